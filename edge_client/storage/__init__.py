"""State that survives a restart, in SQLite and files. Imports no other room but item types of `agent`."""
