"""The optimizer, its learning rate and its steps."""
