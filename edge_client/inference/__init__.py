"""Predictions with the installed head, offline. Imports `training` and the rooms below it."""
