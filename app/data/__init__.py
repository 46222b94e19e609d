"""What every task shares: the order of the samples, random draws, the loader, the copy to the device."""
