"""What the programs cost: memory, time, traffic."""
