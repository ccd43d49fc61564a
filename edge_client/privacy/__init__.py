"""Limits on what a device reveals: policy, noise, accounting, groups and blocks of images."""
