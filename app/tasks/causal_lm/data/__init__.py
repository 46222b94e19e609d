"""Where rows of tokens come from: token folders, nanoGPT's files, the embedded text; and the tokenizers that made them."""
