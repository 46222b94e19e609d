"""`samerun data tokenize` and `inspect` for texts."""
