"""Predictions on the device with the installed head."""
