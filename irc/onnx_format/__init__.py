"""The ONNX format as both directions see it: rules of files, names of operators."""
