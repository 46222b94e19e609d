"""Shared by all tasks: the order of the samples, random draws, the loader, the copy to the device."""
