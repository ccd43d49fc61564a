"""Things a person runs to see protofleet at work."""
