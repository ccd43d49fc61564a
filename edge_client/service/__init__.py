"""The device program as a running service: one thread for the agent, one for the work."""
