"""Statistics: a head in closed form from sums over all devices. May import `algorithms` and `protocol`."""
