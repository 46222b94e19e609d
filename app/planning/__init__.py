"""Memory of a training step before the job: no weights, no data on devices, no GPU."""
