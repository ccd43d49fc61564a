"""Checks of a program's surroundings, as `edge-client doctor` and `aggregator doctor` report them."""
