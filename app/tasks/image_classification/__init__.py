"""Image classification: one of some classes for each image."""
