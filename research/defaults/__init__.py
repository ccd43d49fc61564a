"""Measurements by which defaults were chosen."""
