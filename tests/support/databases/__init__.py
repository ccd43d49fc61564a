"""Real databases for tests."""
