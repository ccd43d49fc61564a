"""Pages about protofleet, and the programs that make some of them."""
