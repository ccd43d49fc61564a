"""Operator commands: carried out by the aggregator that runs on a state directory, or without one by themselves."""
