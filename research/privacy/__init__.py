"""Attacks on what devices upload, and the accuracy that protection costs."""
