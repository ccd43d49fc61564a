"""The device program: images to features to prototypes, with numpy and ONNX Runtime and never torch."""

import protocol as protocol  # before onnxruntime: it turns the telemetry off
