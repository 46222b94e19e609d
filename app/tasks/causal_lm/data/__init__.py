"""Sources of rows of tokens: token folders, the embedded text; and the tokenizers that made them."""
