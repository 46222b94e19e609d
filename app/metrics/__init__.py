"""Measurements of a run: loss, samples, time by phase, traces, trackers."""
