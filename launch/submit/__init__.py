"""A job before it is submitted."""
