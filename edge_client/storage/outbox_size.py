"""Sizes of the outbox, apart from it so that `edge-client --help` does not load numpy."""

MIB = 1024**2
DEFAULT_MB = 64
LARGEST_MB = 900
"""SQLite's limit for one row."""
