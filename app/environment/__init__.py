"""Where a process is: who started it, on which machine, with which share of it."""
