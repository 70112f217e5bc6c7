"""The logits from which a model chooses the tokens that it gives in their place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from irc.backends.reference.evaluate import Run
from irc.core import Module, Value
from irc.ops import AllGather, Argmax, Call, Topk
from irc.results import NEXT_TOKENS
from irc.types import Axes


@dataclass(frozen=True)
class Choice:
    """The result `next_tokens` is the place of the largest of `logits`, of which ranks hold parts
    along the mesh axes `axes`."""

    module: Module
    logits: Value
    axes: Axes

    @property
    def vocabulary(self) -> int:
        """How many tokens there are for certain: the parts of ranks may end with padding."""
        part = self.logits.type.shape[-1]
        assert isinstance(part, int)
        return (part - 1) * self.module.mesh.ways(self.axes) + 1

    def lead(self, run: Run) -> tuple[int, float, float]:
        """(the last token, by how much its logit leads, the largest magnitude) of a run that
        watched `logits`."""
        parts = run.seen[self.logits]
        group = self.module.mesh.groups(self.axes)[-1] if self.axes else [-1]
        last = np.concatenate([parts[rank][-1, -1] for rank in group]).astype(np.float32)
        second, first = np.sort([-np.inf, *last])[-2:]
        magnitude = float(np.abs(last[np.isfinite(last)]).max(initial=0))
        return int(last.argmax()), float(first - second), magnitude


def choice_of(module: Module) -> Choice | None:
    """What the tokens of a module are chosen from, or None where that is not seen."""
    names = module.main.result_names()
    if NEXT_TOKENS not in names:
        return None
    logits = _compared(module.main.returned[names.index(NEXT_TOKENS)])
    if logits is None:
        return None
    candidates = logits.producer
    if isinstance(candidates, AllGather) and isinstance(candidates.x.producer, Topk):
        return _choice(module, candidates.x.producer.x, candidates.axes)
    return _choice(module, logits, ())


def _choice(module: Module, logits: Value, axes: Axes) -> Choice | None:
    static = logits.type.rank == 3 and isinstance(logits.type.shape[-1], int)
    return Choice(module, logits, axes) if static else None


def _compared(tokens: Value) -> Value | None:
    """The numbers whose order decides which tokens these are."""
    while (op := tokens.producer) is not None and op.operands:
        if isinstance(op, Argmax | Topk):
            return op.x
        if isinstance(op, Call):
            tokens = op.callee.returned[op.results.index(tokens)]
        else:
            tokens = op.operands[-1]  # of gather_elements, what it looks up
    return None
