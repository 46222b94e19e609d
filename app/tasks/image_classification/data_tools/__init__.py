"""`samerun data inspect`, `pack` and `bench` for images."""
