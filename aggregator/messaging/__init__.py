"""Publications of the aggregator, and the embedded broker."""
