"""Engines: what executes a model's forward, backward and update."""
