"""What all that run ranks have in common, whatever computes: facts of the manifest, inputs, parts.

ONNX Runtime and engines run on it, with ranks as threads or as processes of any kind.
"""
