"""Processes that simulate devices: the agent's state machine and real MQTT connections, many on one thread."""
