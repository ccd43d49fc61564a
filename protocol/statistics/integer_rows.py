"""Rows of integers, which statistics are sums of: their range, and the size of their second moment."""

MAX_VALUE = 127
"""Largest value of a row, and its smallest, negative."""


def triangle_size(size: int) -> int:
    """Return the number of values in the upper triangle of a matrix of `size` rows."""
    return size * (size + 1) // 2
