"""Real brokers, MQTT sessions, and a proxy with network faults."""
