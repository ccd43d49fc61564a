"""Adds the sums of many devices in blocks: here, or on the workers of a Ray cluster."""
