"""Checkpoints: their content, verification, saving and loading."""
