"""`samerun doctor`: what it starts on each machine."""
