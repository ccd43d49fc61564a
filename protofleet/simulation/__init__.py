"""Fleets in one process: the functions and messages of devices and aggregator, without a network."""
