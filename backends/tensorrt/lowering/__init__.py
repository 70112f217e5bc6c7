"""The ONNX nodes of every operation for TensorRT."""
