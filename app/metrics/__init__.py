"""What a run measures and writes: loss, samples, where the time goes, traces, trackers."""
