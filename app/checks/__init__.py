"""Checks of machines."""
