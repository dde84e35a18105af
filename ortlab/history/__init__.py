"""The history: runs that are kept, listed, opened again, compared, handed on and pruned."""
