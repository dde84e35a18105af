"""Plans of memory that need no training."""
