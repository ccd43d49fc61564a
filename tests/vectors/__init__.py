"""Vectors for other implementations of the wire: `python -m tests.vectors` writes `protocol/vectors/*.json`."""
