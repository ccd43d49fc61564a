"""A whole fleet on one machine, and the small backbone that it uses."""
