"""Calls of the entry points: their arguments, changes of arguments, and calls for concurrent threads."""
