"""`weight_table`: the weights of a module by size, how ranks hold them, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..ir.core import Module, Value, Weight
from ..ir.mesh import Mesh
from ..ir.types import TensorType
from ..text.printer import in_scope
from ..weights import FileRef
from .memory import weights_of
from .places import REPLICATED, general
from .sizes import LocalSizes
from .stages import stages_of

WHOLE = LocalSizes(Mesh(), {})  # of global types
_NOTE = re.compile(rf"(@\S+) {REPLICATED} (.+?)(?: \(\d+ times\))?")


@dataclass(frozen=True)
class WeightGroup:
    """Weights of equal layers: `name` has * for the numbers in which theirs differ.

    `shape` is global, `nbytes` the bytes of one whole weight, `rank_nbytes` the most that one rank
    has of the group. `sharded` has the mesh axes by dimension, as in `0@tp`; `ranks` is the number
    of ranks that hold each. `share` is that of the group in the bytes of all weights. `why` is the
    reason to replicate it, "" where none is known. `source` has the files, and the tensors in them
    of the first one that have another name.
    """

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rank_nbytes: int
    sharded: tuple[str, ...]
    ranks: int
    share: float
    why: str
    source: str

    @property
    def layout(self) -> str:
        """How the ranks hold each, and why it is replicated."""
        ranks = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.sharded or self.ranks == 1:
            return ", ".join([*self.sharded, ranks])
        return f"replicated on {ranks}" + f": {self.why}" * bool(self.why)


def weight_table(
    module: Module, notes: Iterable[str] = (), scope: str | None = None
) -> list[WeightGroup]:
    """The weights by size, largest first, of either view; with `scope` those of one module path.

    `notes` are those of the pass shard, from which the reasons come.
    """
    reasons = {match[1]: match[2] for note in notes if (match := _NOTE.fullmatch(note))}
    holders: dict[Value, list[int]] = {}
    for stage in stages_of(module) if module.functions else ():
        for weight in weights_of([stage.function]):
            holders.setdefault(weight, []).extend(stage.ranks)
    groups: dict[tuple[str, TensorType, int, str], list[Weight]] = {}
    for weight in module.weights.values():
        if scope is None or any(in_scope(op, scope) for op in weight.users):
            ranks = len(holders.setdefault(weight, [*range(module.mesh.ranks)]))
            names = [f"@{name}" for name in (weight.name, *_keys(weight))]
            given = [reasons.get(name) or reasons.get(general(name), "") for name in names]
            why = "" if weight.type.global_type.sharded else next(filter(None, given), "")
            groups.setdefault((general(weight.name), weight.type, ranks, why), []).append(weight)
    total = sum(WHOLE.bytes(w.type.global_type.replicated) for w in module.weights.values()) or 1
    rows: list[WeightGroup] = []
    for (name, type, ranks, why), weights in groups.items():
        whole, first = type.global_type, weights[0]
        most = max(Counter(rank for weight in weights for rank in holders[weight]).values())
        nbytes = WHOLE.bytes(whole.replicated)
        group = WeightGroup(
            first.name if len(weights) == 1 else name,
            len(weights),
            type.dtype,
            WHOLE.shape(whole.replicated),
            nbytes,
            LocalSizes(module.mesh, {}).bytes(type) * most,
            tuple(f"{dim}@{'.'.join(axes)}" for dim, axes in enumerate(whole.axes) if axes),
            ranks,
            nbytes * len(weights) / total,
            why,
            _source(module, first),
        )
        rows.append(group)
    return sorted(rows, key=lambda group: -group.nbytes * group.count)


def _keys(weight: Weight) -> list[str]:
    """The tensors of checkpoints that it is read from."""
    return [source.key for source in weight.ref.sources() if isinstance(source, FileRef)]


def _source(module: Module, weight: Weight) -> str:
    files = dict.fromkeys(Path(module.files[file]).name for file in weight.ref.files())
    others = [key for key in _keys(weight) if key != weight.name]
    return ": ".join(filter(None, [", ".join(files) or "computed", ", ".join(others)]))
