"""Quantization: formats, the sites of a module, statistics of calibration and reports."""
