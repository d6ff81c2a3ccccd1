"""``python -m vopt.optimizer`` is ``vopt``."""

from vopt.optimizer.cli import main

main()
