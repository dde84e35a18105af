"""Metrics that are measured during training, and the recorder that stores them."""
