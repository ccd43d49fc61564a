"""ONNX graphs from PyTorch functions, verified against PyTorch, and fused models."""
