"""Limits on what a device reveals: policy, noise, accounting and groups of images."""
