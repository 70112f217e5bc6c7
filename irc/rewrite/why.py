"""Why no rule applied to an operation: the match that got furthest, and what stopped it."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.core import Function, Op
from .compile import compile_pattern
from .patterns import OpPattern, matching_order
from .rules import Rule, drop_unplaced, unplaced_users
from .watch import MatchFailure, Watch, place


def explain_failures(function: Function, rules: list[Rule], watch: Watch) -> None:
    """Add to `watch`, for every operation that could be a root, the failure that got furthest.

    Where only the root of a larger pattern matched, nothing is added. Failures are sorted by the
    number of operations that were not found.
    """
    explainers = [_Explainer(rule, pattern) for rule in rules for pattern in rule.variants]
    failures: list[MatchFailure] = []
    for op in list(function):
        chosen = [explainer for explainer in explainers if explainer.pattern.cls is op.__class__]
        failed = [
            failure for explainer in chosen if (failure := explainer.explain(op, watch)) is not None
        ]
        if failed:
            failures.append(min(failed, key=lambda failure: failure.missing))
    watch.failures += sorted(failures, key=lambda failure: failure.missing)


class _Explainer:
    """Matches one pattern of a rule and keeps the reason of the match that got furthest."""

    def __init__(self, rule: Rule, pattern: OpPattern) -> None:
        self.rule, self.pattern = rule, pattern
        self.order = matching_order(pattern)
        self.match = compile_pattern(pattern, rule.parameters, self.fail)
        self.matched, self.reason = 0, ""

    def fail(self, matched: int, reason: str) -> None:
        if not self.reason or matched > self.matched:
            self.matched, self.reason = matched, reason

    def explain(self, op: Op, watch: Watch) -> MatchFailure | None:
        """The failure at one root; None if the rule applies or only the root matched."""
        self.matched, self.reason = 0, ""
        for captures in self.match(op):
            watch.reason = None
            new = self.rule.build(*captures)
            drop_unplaced(unplaced_users(captures))
            if new is not None:
                return None  # applies, but no more rewrites are permitted
            return self.failure(op, self.order, watch.reason or "the rule declined")
        matched = self.order[: max(self.matched, 1)]
        if len(matched) == 1 < len(self.order):
            return None
        return self.failure(op, matched, self.reason)

    def failure(self, op: Op, matched: Sequence[OpPattern], reason: str) -> MatchFailure:
        text = f"{_shape(self.pattern, matched)} matched; {reason}"
        return MatchFailure(self.rule.name, len(self.order) - len(matched), place(op), text)


def _shape(pattern: OpPattern, matched: Sequence[OpPattern]) -> str:
    """`mul(silu(linear))`: the operations of a pattern that matched."""
    inner = [
        _shape(p, matched)
        for p in (*pattern.args, *pattern.named.values())
        if isinstance(p, OpPattern) and any(p is m for m in matched)
    ]
    return pattern.opname + (f"({', '.join(inner)})" if inner else "")
