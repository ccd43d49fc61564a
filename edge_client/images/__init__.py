"""Images found, decoded, and turned into features."""
