"""Jobs of large fleets in one process, and on a Ray cluster of this machine."""
