"""Fleets of real programs: processes of aggregators and devices."""
