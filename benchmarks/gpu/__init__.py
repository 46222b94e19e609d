"""The first minutes on a GPU: `make gpu`, or `python -m benchmarks.gpu --out FOLDER`."""
