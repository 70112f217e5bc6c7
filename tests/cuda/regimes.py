"""The regime of some sizes, for kernels that are made without a planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from irc.backends.cuda.plan.regime import Regime, Target
from irc.backends.cuda.tuning import device_of
from irc.ir.core import Value


def regime_of(
    sizes: Mapping[str, int] | None = None,
    target: Target | None = None,
    stored: Iterable[Value] = (),
) -> Regime:
    """The regime at these sizes on a GPU, an H200 by default, with these values in memory."""
    regime = Regime(sizes or {}, device_of(target))
    regime.stored = dict.fromkeys(stored, "a test says so")
    return regime
