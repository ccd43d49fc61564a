"""ONNX Runtime: models validated, opened and run under a watchdog. Imports no other room."""
