"""Checkpoints: what is saved, how it is verified and how it is read back."""
