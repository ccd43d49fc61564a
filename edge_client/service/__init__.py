"""The device program as a service: the state machine, an MQTT session, and jobs as child processes."""
