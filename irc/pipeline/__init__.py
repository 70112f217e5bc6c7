"""Passes, the text that chains them, and the runner that instruments watch."""

from ..rewrite.stats import RuleStats, Stats
from .base import PASSES, Compilation, Pass, describe_options, register
from .load import load_file
from .options import Option, option
from .run import Instrument, Step, run_pipeline
from .text import GROUP, Pipeline, parse_pipeline

__all__ = [
    "GROUP",
    "PASSES",
    "Compilation",
    "Instrument",
    "Option",
    "Pass",
    "Pipeline",
    "RuleStats",
    "Stats",
    "Step",
    "describe_options",
    "load_file",
    "option",
    "parse_pipeline",
    "register",
    "run_pipeline",
]
