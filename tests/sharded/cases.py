"""Case: a model to shard, its inputs and plan; and random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import irc
from irc.backends.reference import evaluate
from irc.frontends import random_weights
from irc.frontends.trace import Spec
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from tests.choices import settled

HIDDEN = 24
SIZES = {"B": 6, "S": 5, "M": 7, "R": 24}  # R is a multiple of all numbers of ranks
X = {"x": Spec("f32", ("B", "S", HIDDEN))}
POSITIONS = {"positions": Spec("i32", ("B", "S"))}
IDS = {"ids": Spec("i32", ("B", "S"))}


@dataclass(frozen=True)
class Case:
    """A model, its inputs, the rows of a plan (megatron without), and the meshes to try."""

    model: Callable[[], Any]
    inputs: dict[str, Spec]
    plan: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()

    def module(self) -> Module:
        """The unsharded module with random weights."""
        symbols = {s for spec in self.inputs.values() for s in spec.shape if isinstance(s, str)}
        dims = {symbol: (1, SIZES[symbol], 48) for symbol in sorted(symbols)}
        return random_weights(irc.trace(self.model(), self.inputs, dims, "case"), 3)

    def tolerance(self) -> float:
        """The relative error that reordered sums may have in these dtypes."""
        dtypes = {spec.dtype for spec in self.inputs.values()}
        return 3e-2 if "bf16" in dtypes else 4e-3 if "f16" in dtypes else 1e-5


def pairs(names: Iterable[str], meshes: Sequence[str], each: int) -> list[tuple[str, str]]:
    """Every name with `each` of the meshes; neighbours have others."""
    return [
        (name, meshes[(i * each + k) % len(meshes)])
        for i, name in enumerate(names)
        for k in range(each)
    ]


def drawn(module: Module, rng: np.random.Generator, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs: ids, some of them out of range; valid lengths and positions."""
    known = SIZES | sizes
    args = {str(arg.name): arg.type for arg in module.main.args}
    return settled(
        lambda: {name: _drawn(name, type, rng, known) for name, type in args.items()},
        module,
        lambda inputs: evaluate(module, inputs),
    )


def _drawn(
    name: str, type: TensorType, rng: np.random.Generator, sizes: dict[str, int]
) -> np.ndarray:
    shape = tuple(n if isinstance(n, int) else sizes[str(n)] for n in type.shape)
    dtype = numpy_dtype(type.dtype)
    if type.dtype == "bool":
        return rng.random(shape) < 0.7
    if name == "lengths":
        return rng.integers(1, SIZES["M"] + 1, shape).astype(dtype)
    if dtype.kind == "i":
        return rng.integers(0, 16, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)
