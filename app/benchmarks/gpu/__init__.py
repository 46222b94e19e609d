"""The first minutes on a GPU: `make gpu`, or `python -m app.benchmarks.gpu --out FOLDER`."""
