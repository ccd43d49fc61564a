"""Export pretrained backbones to ONNX files with the metadata that devices need."""
