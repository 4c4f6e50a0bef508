"""The one place that holds hopwell's version."""

__version__ = "0.1.0"
