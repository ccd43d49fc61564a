"""The project's functions that the aggregator enters on four ways, from an event to its result."""
