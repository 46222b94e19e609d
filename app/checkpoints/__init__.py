"""Every way that weights leave a run or enter it."""
