"""Every algorithm with its defaults on the same fleets."""
