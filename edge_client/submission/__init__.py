"""Submissions and evaluations: what a device uploads, built from its images."""
