"""Shared by devices and aggregator: messages, topics, transfers, MQTT sessions, storage and preprocessing."""
