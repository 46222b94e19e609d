"""The options of command lines."""
