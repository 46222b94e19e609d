"""Which of some classes is in a picture."""
