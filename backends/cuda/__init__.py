"""NVIDIA GPUs driven from one process each: memory, streams, graphs, and collectives over NCCL.

The packages cuda-python and nccl4py are imported where they are used, never with this package.
"""
