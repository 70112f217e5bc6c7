"""NVIDIA GPUs, one per process: memory, streams, graphs, kernels, and collectives over NCCL.

The packages cuda-python and nccl4py are imported where they are used, never with this package.
"""
