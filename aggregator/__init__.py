"""The server program: prototypes of a fleet to one head, and the head back to the fleet as ONNX."""

import protocol as protocol  # before onnxruntime: it turns the telemetry off

EXTRAS = "aggregator,cpu"
"""Extras of the package that the program needs."""
