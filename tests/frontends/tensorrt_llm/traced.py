"""Runs what a script of TensorRT-LLM builds: traces every rank, merges, and evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import irc
from irc.frontends.tensorrt_llm.context import Dialect, new_session
from irc.frontends.tensorrt_llm.merge import merge
from irc.frontends.tensorrt_llm.network import Network, net_guard


@dataclass
class World:
    """The part of a Mapping that tracing and merging need."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def tp_group(self) -> list[int]:
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))


def trace(
    build: Callable[[Any], object],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    make: Callable[..., Any] | None = None,
) -> irc.Module:
    """The module of what `build` builds, which gets the mapping of each rank.

    `make` makes a mapping from rank, tp_size, pp_size and cp_size; by default a plain one.
    """
    sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp}
    networks: dict[int, Network] = {}
    for rank in range(tp * pp * cp):
        networks[rank] = Network()
        with net_guard(networks[rank]):
            build((make or World)(rank=rank, **sizes))
    module = merge(networks, World(**sizes))
    assert str(irc.parse(str(module))) == str(module)
    return module


def run(
    build: Callable[[Any], object],
    inputs: Mapping[str, Any],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    dialect: Dialect = "B",
    make: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """The outputs of what `build` builds, on all its ranks, for global inputs."""
    with new_session(dialect):
        return irc.evaluate(trace(build, tp, pp, cp, make=make), inputs)
