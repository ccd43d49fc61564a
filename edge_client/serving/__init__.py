"""Predictions with the newest head for other programs: over HTTP, and for a folder that a camera fills."""
