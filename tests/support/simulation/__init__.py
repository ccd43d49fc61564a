"""Devices and an aggregator in simulated time, and clocks that a test moves."""
