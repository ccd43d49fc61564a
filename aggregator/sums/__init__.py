"""Sums with noise: the job that makes a head of them, and the lists whose sums a second operator opens."""
