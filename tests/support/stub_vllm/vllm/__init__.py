"""A stand-in for vLLM with the few names that a trial process uses, so that faults can be made at will and in a second.

It has an engine core of its own: a child process whose death is noticed as vLLM notices it. ``STUB_FAULT`` chooses what goes
wrong (see ``v1/engine/async_llm.py``). Runs on a bare interpreter: standard library only.
"""

__version__ = "0.32.0+stub"
