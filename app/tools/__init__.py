"""`samerun parity`, `verify`, `plan`, `generate` and `data`."""
