"""The daemon: its event loop, the messages of devices, and what it announces to the fleet."""
