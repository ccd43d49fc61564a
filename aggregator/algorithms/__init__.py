"""One file per paper, each of pure functions."""
