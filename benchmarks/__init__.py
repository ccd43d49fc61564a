"""Costs and accuracy beside what else one could use: `python -m benchmarks`."""
