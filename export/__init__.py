"""Pretrained backbones to ONNX files that carry all that a device needs to know of them."""
