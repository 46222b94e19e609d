"""Initial weights: the same bits under every preset."""
