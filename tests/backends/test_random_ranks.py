"""Random local modules on two to four ranks: threads on ONNX Runtime against numpy in lockstep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.core import Value
from irc.dims import Dim
from irc.text import parse_module
from irc.types import TensorType
from tests.backends.ranks import Builder, agrees, drawn
from tests.fresh import fresh

MESHES = {
    "tp=2": ("tp",),
    "tp=3": ("tp",),
    "tp=4": ("tp",),
    "cp=2, tp=2": ("cp", "tp", "cp.tp", "tp.cp"),
    "dp=1, tp=2": ("dp", "tp"),
}
REDUCING = ("all_reduce", "reduce")


class Random:
    """A module that grows by random operations over what it has so far.

    In f64, and with one factor of a product in [-1, 1]: values at most double from step to step,
    so that a sine of them has digits left, and rounding stays far below any mistake.
    """

    def __init__(self, mesh: str, rng: np.random.Generator) -> None:
        args = {name: TensorType("f64", (12, 24)) for name in ("x", "y")}
        self.made, self.rng, self.axes = Builder(mesh, args), rng, MESHES[mesh]
        self.values: list[Value] = list(self.made.function.args)

    @staticmethod
    def sizes(x: Value) -> tuple[int, ...]:
        """The shape, of which no dimension is a symbol here."""
        return tuple(size for size in x.type.shape if not isinstance(size, Dim))

    def pick(self, *items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def grow(self) -> None:
        x = self.pick(*self.values[-6:])
        found = self.pick(self.unary, self.binary, self.layout, self.talk, self.talk, self.turn)(x)
        if found is not None and 1 < np.prod(self.sizes(found)) <= 40_000:
            self.values.append(found)

    def unary(self, x: Value) -> Value:
        return self.made.put(self.pick("neg", "tanh", "sigmoid", "sin"), x)

    def binary(self, x: Value) -> Value:
        other = self.pick(*[v for v in self.values if v.type is x.type])
        if self.pick(True, False, False):
            return self.made.put("mul", self.made.put("tanh", x), other)
        return self.made.put(self.pick("add", "sub"), x, other)

    def layout(self, x: Value) -> Value:
        made, shape = self.made, self.sizes(x)
        last = shape[-1]
        if len(shape) == 4:
            return made.put("reshape", x, shape=(int(np.prod(shape)) // last, last))
        return self.pick(
            lambda: made.put("transpose", x, order=tuple(range(x.type.rank))[::-1]),
            lambda: made.put("unsqueeze", x, dims=(1,)),
            lambda: made.put("slice", x, dim=-1, start=0, stop=max(1, last // 2)),
            lambda: made.put("concat", [x, x], dim=0),
            lambda: made.put("softmax", x, dim=-1),
        )()

    def talk(self, x: Value) -> Value | None:
        """A collective, of what is small enough for many of them to stay so."""
        axis, rank = self.pick(*self.axes), x.type.rank
        ways = self.made.module.mesh.ways(tuple(axis.split(".")))
        root, dim = int(self.rng.integers(ways)), int(self.rng.integers(rank))
        fits = [d for d, size in enumerate(self.sizes(x)) if size % ways == 0]
        bounded = self.made.put("tanh", x)
        kind = self.pick("sum", "max", "min", "prod")
        name = self.pick(
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "collective_gather",
            "reduce_scatter",
            "collective_scatter",
            "all_to_all",
            "all_to_all",
        )
        if name in REDUCING:
            at = {"op": kind} | ({"root": root} if name == "reduce" else {})
            return self.made.talk(name, bounded, axis, **at)
        if name == "broadcast":
            return self.made.talk(name, x, axis, root=root)
        if name in ("all_gather", "collective_gather"):
            at = {"dim": dim} | ({"root": root} if name == "collective_gather" else {})
            return self.made.talk(name, x, axis, **at)
        if not fits:
            return None
        cut = int(self.pick(*fits))
        if name == "all_to_all":
            return self.made.talk(name, x, axis, split=cut, concat=dim)
        at = {"op": kind} if name == "reduce_scatter" else {"root": root}
        return self.made.talk(name, bounded, axis, dim=cut, **at)

    def turn(self, x: Value) -> Value:
        """Something that differs from rank to rank."""
        made = self.made
        place = made.put("cast", made.put("rank", axis=self.pick(*self.axes)), dtype="f64")
        return made.put("add", x, place)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("number", range(6))
def test_random_modules(mesh: str, number: int, tmp_path: Path) -> None:
    rng = fresh(100 + number)
    random = Random(mesh, rng)
    while len(random.values) < 24:
        random.grow()
    returned = [*random.values[-5:], *random.values[3:20:4]]
    module = random.made.done({f"r{i}": value for i, value in enumerate(returned)})
    ranks = module.mesh.ranks
    inputs = {name: drawn(rng, "f64", (12, 24), ranks) for name in ("x", "y")}
    parsed = parse_module(str(module))
    agrees(parsed, inputs, tmp_path)
