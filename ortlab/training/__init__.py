"""Training runs: the steps, the threads around them, and what they save."""
