"""What watches a pipeline run: timing, statistics, diffs, dumps, numerics, limits, reproducers."""

from ..pipeline.run import Instrument, VerifyEach
from .limit import Limit, first_wrong, parse_limit
from .numerics import CheckNumerics, random_inputs, small_sizes
from .print_diff import PrintDiff
from .record import DumpDir, Reproducer
from .report import Statistics, Timing
from .why_not import WhyNot

__all__ = [
    "CheckNumerics",
    "DumpDir",
    "Instrument",
    "Limit",
    "PrintDiff",
    "Reproducer",
    "Statistics",
    "Timing",
    "VerifyEach",
    "WhyNot",
    "first_wrong",
    "parse_limit",
    "random_inputs",
    "small_sizes",
]
