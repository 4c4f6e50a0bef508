"""Adapters of hopwell for other libraries and engines. Each module imports its library, and is imported only for it."""
