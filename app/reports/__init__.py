"""Reports of runs: curves, comparisons, scaling, the page of a run, the terminal."""
