"""The version of ortlab."""

__version__ = "0.1.0"
