"""Public data, its features, and how they are divided among devices."""
