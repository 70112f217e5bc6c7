"""CUDA C++ for operations: an expression per element, and kernels around such expressions."""
