"""The device program: pictures to features to prototypes, with numpy and ONNX Runtime and never torch."""
