"""The server program: prototypes of a fleet to one head, and the head back to the fleet as ONNX."""
