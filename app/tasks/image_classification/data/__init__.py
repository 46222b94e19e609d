"""Images: folders, containers and data sets, read, split and augmented."""
