"""Costs of a fleet with real programs: beside Flower, by its size, and after a crash."""
