"""Measurements of hopwell's kernels beside their peers: ``python -m hopwell.perf --help``.

A figure is comparable only with figures of the same run. A run therefore interleaves everything that it compares,
ceilings included. Its file under ``perf/results`` records the GPU, date and versions.
"""


class MissingError(RuntimeError):
    """A command needs a tool or a GPU that this machine does not have; the message is one line with the remedy."""
