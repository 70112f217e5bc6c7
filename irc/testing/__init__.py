"""A bench for authors of passes: `check_pass(pass)` runs one over random and over given modules."""

from .check import PassCheck, check_pass

__all__ = ["PassCheck", "check_pass"]
