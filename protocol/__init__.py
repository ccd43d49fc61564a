"""What devices and aggregator share: messages, topics, transfers, MQTT sessions, storage and preprocessing."""
