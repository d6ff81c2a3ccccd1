"""How we search: the loop, the engines, the load, the study and the report. The only impure package."""
