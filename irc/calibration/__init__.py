"""Calibration: runs a model on data and gathers statistics of the inputs of its linears."""

from .run import calibrate

__all__ = ["calibrate"]
