"""What a run is asked from outside, and what ends it when it hangs."""
