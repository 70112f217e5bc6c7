"""Rewrite rules: patterns over operations, and the driver that applies them until none matches."""

from .driver import apply_rules, erase_dead, replace
from .patterns import P, Pattern
from .rules import Rule, rule
from .stats import RuleStats, Stats
from .watch import MatchFailure, Watch, decline, permit, report_failure, watching

__all__ = [
    "MatchFailure",
    "P",
    "Pattern",
    "Rule",
    "RuleStats",
    "Stats",
    "Watch",
    "apply_rules",
    "decline",
    "erase_dead",
    "permit",
    "replace",
    "report_failure",
    "rule",
    "watching",
]
