"""The run folder: who writes into it, and what it holds."""
