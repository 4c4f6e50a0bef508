"""Measurements of hopwell's kernels beside their peers: ``python -m hopwell.perf --help``.

A figure is only comparable with figures of the same run, so a run interleaves everything that it compares, ceilings
included, and its file under ``perf/results`` says on what GPU, when and with which versions it was made.
"""


class MissingError(RuntimeError):
    """A command needs a tool or a GPU that this machine lacks; the message is one line with the remedy."""
