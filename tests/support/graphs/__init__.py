"""ONNX graphs and torch networks for tests."""
