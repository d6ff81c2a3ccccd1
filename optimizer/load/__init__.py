"""Load: the workload, the plan of one measurement, and the driver that runs it against any engine."""
