"""Memory plans that are computed without training."""
