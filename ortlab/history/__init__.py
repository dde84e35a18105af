"""History of runs: storage, listing, reading, comparison, export and pruning."""
