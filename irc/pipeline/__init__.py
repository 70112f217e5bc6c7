"""Passes, the text that chains them, and the runner that instruments watch."""

from ..rewrite.stats import RuleStats, Stats
from .base import PASSES, Pass, describe_options, register
from .load import load_file
from .run import Instrument, Step, run_pipeline
from .text import GROUP, Pipeline, parse_pipeline

__all__ = [
    "GROUP",
    "PASSES",
    "Instrument",
    "Pass",
    "Pipeline",
    "RuleStats",
    "Stats",
    "Step",
    "describe_options",
    "load_file",
    "parse_pipeline",
    "register",
    "run_pipeline",
]
