"""Cost of the programs: memory, time, traffic."""
