"""Batches of requests, with the ways to pass them to an entry point and their expected results."""
