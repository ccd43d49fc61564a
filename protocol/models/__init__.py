"""ONNX files of backbones, graphs and heads: their metadata, and the preprocessing that it defines."""
