"""The device program as a service: the agent's state machine, an MQTT session, and jobs as child processes."""
