"""Predictions on the device with the installed head: of files, over HTTP, and of a folder that a camera fills."""
