"""Instruments of a pipeline run: timing, statistics, diffs, dumps, numerics, limits."""

from ..run import Instrument, VerifyEach
from .history import History
from .limit import Limit, WhyNot, parse_limit
from .numerics import CheckNumerics, random_inputs, small_sizes
from .record import DumpDir, PrintDiff, Replay, Reproducer
from .report import Statistics, Timing

__all__ = [
    "CheckNumerics",
    "DumpDir",
    "History",
    "Instrument",
    "Limit",
    "PrintDiff",
    "Replay",
    "Reproducer",
    "Statistics",
    "Timing",
    "VerifyEach",
    "WhyNot",
    "parse_limit",
    "random_inputs",
    "small_sizes",
]
