"""A user's own task: one file, with a recipe beside it."""
