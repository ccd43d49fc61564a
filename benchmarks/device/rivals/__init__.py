"""Programs that a user would write instead; each runs in a process of its own and imports only what it needs."""
