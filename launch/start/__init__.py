"""A run from outside: started, supervised, restarted."""
