"""Submissions of each kind, built from the device's images."""
