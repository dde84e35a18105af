"""Comparison of training settings on this machine: a race of some and a search among all."""
