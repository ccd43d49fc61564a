"""FedTC on the aggregator: a head from the prototypes of all devices. May import `algorithms` and `protocol`."""
