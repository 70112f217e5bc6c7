"""`Timing` and `Statistics` of passes, as rows and as text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...ir.core import Module
from ...report import table
from ..run import Instrument, Step


@dataclass
class TimingRow:
    """One pass: its seconds, and the number of operations before and after."""

    pass_: str
    seconds: float
    ops_before: int
    ops_after: int


class Timing(Instrument):
    """Times every pass. As the last instrument it does not time the others."""

    def __init__(self) -> None:
        self.rows: list[TimingRow] = []
        self._ops = 0
        self._started = 0.0

    def before(self, step: Step, module: Module) -> None:
        self._ops = _count(module)
        self._started = time.perf_counter()

    def after(self, step: Step, module: Module) -> None:
        seconds = time.perf_counter() - self._started
        self.rows.append(TimingRow(str(step), seconds, self._ops, _count(module)))

    def __str__(self) -> str:
        rows = [
            (f"{row.seconds * 1e3:.1f} ms", f"{row.ops_before} -> {row.ops_after} ops", row.pass_)
            for row in self.rows
        ]
        total = sum(row.seconds for row in self.rows)
        return table([*rows, (f"{total * 1e3:.1f} ms", "", "total")], numbers_right=True)


def _count(module: Module) -> int:
    return sum(1 for _ in module.ops())


class Statistics(Instrument):
    """The counts of every pass, and tries, hits and time of every rule."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def after(self, step: Step, module: Module) -> None:
        self.steps.append(step)

    def __str__(self) -> str:
        lines: list[str] = []
        for step in self.steps:
            lines.append(f"{step.index}. {step}")
            rows = [(f"  {what}", f"{n}", "", "", "") for what, n in step.stats.counts.items()]
            rows += [
                (
                    f"  {rule.name}",
                    f"{rule.hits}",
                    f"of {rule.tries} tries",
                    f"{rule.seconds * 1e3:.1f} ms",
                    rule.where,
                )
                for rule in step.stats.rules.values()
            ]
            lines.append(table(rows, numbers_right=True) if rows else "  nothing counted")
        return "\n".join(lines)
