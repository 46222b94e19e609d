"""A user's own task: one file, with a recipe next to it."""
