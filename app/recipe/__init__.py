"""What is trained, and in which batches."""
