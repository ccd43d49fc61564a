"""Limits on what a device reveals: policy, noise, accounting and the guard against differencing."""
