"""Memory of a training step before the job (`samerun plan`): no weights, no data on devices, no GPU."""
