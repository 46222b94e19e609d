"""Checks of a job, its script and its submission."""
