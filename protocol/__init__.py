"""Shared by devices and aggregator: messages, topics, transfers, MQTT sessions, storage and preprocessing."""

import os

__version__ = "0.1.0"

# ONNX Runtime sends telemetry to Microsoft since 1.29, with the hardware and the path of the program. It reads this
# variable when it is imported, so it is set here: every package imports this one first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
