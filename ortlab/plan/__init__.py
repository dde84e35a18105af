"""Plans of memory and time that are computed without training."""
