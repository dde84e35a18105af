"""Training runs: the steps, what watches over them and what they keep."""
