"""Export pretrained backbones to ONNX files with the metadata that devices need."""

import protocol as protocol  # before onnxruntime: it turns the telemetry off
