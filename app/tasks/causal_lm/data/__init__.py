"""Where rows of tokens come from: token folders, the embedded text; and the tokenizers that made them."""
