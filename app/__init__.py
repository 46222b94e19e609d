"""The application: what runs in each process of a run."""
