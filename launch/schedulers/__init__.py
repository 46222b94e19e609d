"""What the scheduler gave."""
