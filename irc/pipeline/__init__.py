"""Passes, the text that chains them, and the runner that instruments watch."""

from ..rewrite.stats import RuleStats, Stats
from .base import PASSES, Pass, describe_options, register
from .load import load_installed, load_passes
from .run import Instrument, Step, run_pipeline
from .text import Pipeline, parse_pipeline

__all__ = [
    "PASSES",
    "Instrument",
    "Pass",
    "Pipeline",
    "RuleStats",
    "Stats",
    "Step",
    "describe_options",
    "load_installed",
    "load_passes",
    "parse_pipeline",
    "register",
    "run_pipeline",
]
