"""Runs plans on a GPU, one rank per process; what engines of TensorRT need too is shared."""
