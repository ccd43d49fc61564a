"""Pages about protofleet, and the program that makes one of them."""
