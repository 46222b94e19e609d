"""Checks of machines, data and runs: `samerun doctor`, `data`, `parity` and `verify`."""
