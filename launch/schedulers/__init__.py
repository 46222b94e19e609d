"""Allocations and jobs of schedulers."""
