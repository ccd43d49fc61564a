"""Predictions over HTTP, and the limited server that the review's page uses, too."""
