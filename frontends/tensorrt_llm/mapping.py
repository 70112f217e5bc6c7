"""`Mapping`: which part of a model the ranks of a world hold, and the groups that communicate."""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...ir.mesh import Mesh
from .api import api
from .context import current_session
from .errors import ArgumentError, ScriptError

_SIZES = ("world_size", "rank", "gpus_per_node", "cp_size", "tp_size", "pp_size")
_KINDS = ("tp", "pp", "cp", "moe_tp", "moe_ep")  # of groups


def _has_several(kind: str) -> Any:
    """The method that says whether groups of a kind have several ranks."""

    def has_several(self: Mapping) -> bool:
        return getattr(self, f"{kind}_size") > 1

    return has_several


@api("mapping.Mapping")
class Mapping:
    """The ranks of a world: pipeline stages slowest, then context, then tensor parallelism.

    `gpus_per_node` says only which rank is on which host. The `tp_size` ranks of a group hold
    experts as `moe_tp_size` shards of `moe_ep_size` sets of experts; one follows from the other,
    and -1 is as many shards as there are. Unlike in TensorRT-LLM `pp_layers` leaves out no layer.

    `tp_rank` is this rank's position in its group, `tp_group` the ranks of that group in order,
    `tp_groups` all groups; alike for pp, cp, moe_tp and moe_ep.
    """

    def __init__(
        self,
        world_size: int | None = None,
        rank: int = 0,
        gpus_per_node: int = 8,
        tp_size: int = 1,
        pp_size: int = 1,
        *,
        cp_size: int = 1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
    ) -> None:
        is_default, world_size = world_size is None, world_size or 1
        if moe_ep_size == -1:
            moe_ep_size = 1 if moe_tp_size == -1 else tp_size // max(1, moe_tp_size)
        if moe_tp_size == -1:
            moe_tp_size = tp_size // max(1, moe_ep_size)
        self.world_size, self.gpus_per_node = world_size, gpus_per_node
        self.tp_size, self.pp_size, self.cp_size = tp_size, pp_size, cp_size
        self.moe_tp_size, self.moe_ep_size = moe_tp_size, moe_ep_size
        own = {name: getattr(self, name) for name in ("tp_size", "pp_size", "cp_size")}
        experts = {"moe_tp_size": moe_tp_size, "moe_ep_size": moe_ep_size}
        for whole, size, parts in (("world_size", world_size, own), ("tp_size", tp_size, experts)):
            if prod(parts.values()) != size or min(parts.values()) < 1:
                raise ArgumentError(
                    f"{whole} is {size}, but {' * '.join(parts)} is "
                    f"{' * '.join(map(str, parts.values()))}; give sizes whose product it is"
                )
        sizes = {"pp": pp_size, "cp": cp_size, "tp": tp_size}
        if moe_tp_size > 1 and moe_ep_size > 1:
            sizes |= {"tp": moe_tp_size, "ep": moe_ep_size}
        self.mesh = Mesh(tuple(sizes.items()))
        self.rank = rank
        session = current_session()
        if session.mapping is None or not is_default:  # a default Mapping() says nothing
            session.mapping = self

    def __getattr__(self, name: str) -> Any:
        kind, _, what = name.rpartition("_")
        if kind not in _KINDS or what not in ("rank", "group", "groups"):
            raise AttributeError(f"Mapping has no attribute called {name!r}")
        groups = self.mesh.groups(self.axes_of(kind))
        own = next(group for group in groups if self.rank in group)
        return {"rank": own.index(self.rank), "group": own, "groups": groups}[what]

    @property
    def rank(self) -> int:
        """This rank of the world."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not -1 <= rank < self.world_size:  # -1: of no rank
            raise ArgumentError(
                f"there is no rank {rank} in a world of {self.world_size}; ranks count from 0"
            )
        self._rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().values()))

    def __repr__(self) -> str:
        return f"Mapping({', '.join(f'{name}={value}' for name, value in self.to_dict().items())})"

    # -- axes of the mesh

    def axes_of(self, kind: str) -> tuple[str, ...]:
        """The mesh axes of the groups tp, pp, cp, moe_tp or moe_ep; () where each has one rank."""
        both = self.moe_tp_size > 1 and self.moe_ep_size > 1
        match kind:
            case "tp":
                return ("tp", "ep") if both else ("tp",)
            case "moe_tp":
                return ("tp",) if self.moe_tp_size > 1 else ()
            case "moe_ep":
                return () if self.moe_ep_size == 1 else ("ep",) if both else ("tp",)
            case _:
                return (kind,)

    def axis_of(self, group: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes whose ranks a group has, in any order; () for a single rank. An Error where
        the group is no such."""
        ranks = sorted(map(int, group))
        if len(ranks) == 1:
            return ()
        world = tuple(name for name, size in self.mesh.axes if size > 1)
        choices = {axes: self.mesh.groups(axes) for axes in (*map(self.axes_of, _KINDS), world)}
        for axes, groups in choices.items():
            if ranks in map(sorted, groups):
                return axes
        shown = [f"{'.'.join(a)}: {groups}" for a, groups in choices.items() if len(groups[0]) > 1]
        raise ScriptError(
            f"the group {list(group)} has the ranks of no axis of the world {self.mesh}; expected "
            f"one of {'; '.join(shown) or 'a single rank'}; take tp_group, pp_group, cp_group, "
            "moe_tp_group or moe_ep_group of the Mapping"
        )

    # -- stages, layers and experts

    def is_first_pp_rank(self) -> bool:
        """Whether this rank is in the first stage."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether this rank is in the last stage."""
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self) -> int:
        """The rank that sends to this one; that of the last stage for the first."""
        return self.pp_group[self.pp_rank - 1]

    def next_pp_rank(self) -> int:
        """The rank that this one sends to; that of the first stage for the last."""
        return self.pp_group[(self.pp_rank + 1) % self.pp_size]

    def pp_layers(self, num_layers: int) -> list[int]:
        """The layers of this stage; the first stages have one more where they are not even."""
        return _part(num_layers, self.pp_size, self.pp_rank)

    def ep_experts(self, num_experts: int) -> list[int]:
        """The experts of this rank; their number must be a multiple of moe_ep_size."""
        if num_experts % self.moe_ep_size:
            raise ArgumentError(
                f"{num_experts} experts cannot be distributed over moe_ep_size={self.moe_ep_size} "
                "ranks; choose a divisor, or shard every expert with moe_tp_size"
            )
        return _part(num_experts, self.moe_ep_size, self.moe_ep_rank)

    has_tp, has_pp, has_cp = map(_has_several, ("tp", "pp", "cp"))
    has_moe_tp, has_moe_ep = map(_has_several, ("moe_tp", "moe_ep"))

    # -- config.json

    @classmethod
    def from_dict(cls, mapping: Table[str, Any]) -> Mapping:
        """The mapping of a checkpoint's config.json, whose later keys may have their defaults."""
        given = {
            n: x for n, x in mapping.items() if n in _SIZES or x not in (None, False, -1, 1, {})
        }
        return cls(**given)

    def to_dict(self) -> dict[str, int]:
        """The sizes as config.json has them."""
        return {name: getattr(self, name) for name in (*_SIZES, "moe_tp_size", "moe_ep_size")}


def _part(count: int, parts: int, index: int) -> list[int]:
    """The numbers below `count` of one of `parts` consecutive parts; the first are larger."""
    return list(map(int, np.array_split(np.arange(count), parts)[index]))
