"""Engines, which execute a model's forward pass, backward pass and update."""
