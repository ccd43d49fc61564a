"""State that survives a restart, in SQLite and files, and what jobs get and leave. Imports `core` only."""
