"""The environment of a process: who started it, on which machine, with which share of it."""
