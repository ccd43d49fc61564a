"""`aggregator status`: the state of the fleet, read from the state directory of a running or stopped aggregator."""
