"""Causal language models: text as rows of tokens, each predicted from those before it."""
