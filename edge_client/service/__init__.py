"""The device program as a service: the agent's state machine, a worker thread and an MQTT session."""
