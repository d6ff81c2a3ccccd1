"""Engines: one protocol, and a real, a served and a simulated kind of it."""
