"""Clusters of prototypes and groups of devices, in plain numpy; imports no other room."""
