"""Cases to shard, with their inputs and plans; and the comparison of every rank's results with its
shard of the results of the unsharded module, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import irc
import irc.passes
from irc.analysis.communication import messages
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.topology_file import default_topology
from irc.backends.reference import evaluate
from irc.frontends import random_weights
from irc.frontends.trace import Spec
from irc.ir.core import Module, Value, Weight
from irc.ir.dtypes import dtype, numpy_dtype
from irc.ir.types import TensorType
from irc.pipeline import Stats, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.testing.wanted import Wanted
from tests.choices import settled
from tests.matrix.checking import check_text

assert irc.passes  # importing it registers the passes
Arrays = Mapping[str, np.ndarray]
BEFORE = "inline, canonicalize, cse"
FUSE = "fuse-collectives{norm=true}"
LOCAL = (FUSE, "fuse-norm", "fuse-qkv", "fuse-experts", "fuse-quantize")
LOCAL += ("cse", "canonicalize", "fold", "dce")
AFTER = ("fuse-gated-mlp", FUSE, "localize", *LOCAL)
SIZES = {"B": 6, "S": 5, "M": 7, "R": 24}  # R is a multiple of all numbers of ranks


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the rows of a plan (megatron without)."""

    model: Callable[[], Any]
    inputs: dict[str, Spec]
    plan: tuple[str, ...] = ()

    def module(self) -> Module:
        """The unsharded module with random weights."""
        symbols = {s for spec in self.inputs.values() for s in spec.shape if isinstance(s, str)}
        dims = {symbol: (1, SIZES[symbol], 48) for symbol in sorted(symbols)}
        return random_weights(irc.trace(self.model(), self.inputs, dims, "case"), 3)

    def tolerance(self) -> float:
        """The relative error that reordered sums may have in these dtypes."""
        dtypes = {spec.dtype for spec in self.inputs.values()}
        return 3e-2 if "bf16" in dtypes else 4e-3 if "f16" in dtypes else 1e-5


def drawn(module: Module, rng: np.random.Generator, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs: ids, some of them out of range; valid lengths and positions."""
    args = {str(arg.name): arg.type for arg in module.main.args}
    return settled(
        lambda: {name: _drawn(name, type, rng, SIZES | sizes) for name, type in args.items()},
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


def spread(
    module: Module,
    inputs: Arrays,
    mesh: str,
    *,
    plan: Path | str = "",
    sequence: bool = False,
    after: Sequence[str] = AFTER,
    tolerance: float = 1e-5,
) -> Stats:
    """Run all passes from the unsharded module to the local view, comparing the results after
    each; the statistics of the pass shard."""
    wanted = evaluate(module, inputs)
    run_pipeline(module, BEFORE)
    options = [f'mesh="{mesh}"', *([f'plan="{plan}"'] if plan else [])]
    options += ["sequence=true"] if sequence else []
    (step,) = run_pipeline(module, f"shard{{{', '.join(options)}}}")
    check(module, inputs, wanted, f"sharded over {mesh}", tolerance)
    for text in after:
        run_pipeline(module, text, [VerifyEach()])
        check(module, inputs, wanted, f"over {mesh} after {text}", tolerance)
    check_text(module)
    return step.stats


def sharded(text: str, mesh: str, plan: Path | str = "") -> tuple[Module, Stats]:
    """The module of a text after the pass shard, and its statistics."""
    module = irc.parse(text)
    more = f', plan="{plan}"' if plan else ""
    (step,) = run_pipeline(module, f'shard{{mesh="{mesh}"{more}}}')
    return module, step.stats


def check(
    module: Module, inputs: Arrays, wanted: Arrays, what: str, tolerance: float = 1e-5
) -> None:
    """Raise unless the module gives the wanted results, on every rank, to rounding relative to the
    largest number of each."""
    limits: dict[str, float] = {}
    for name, array in wanted.items():
        numbers = array.astype(np.float64)
        largest = np.max(np.abs(numbers[np.isfinite(numbers)]), initial=1)
        limits[name] = tolerance * float(largest)
    Wanted(wanted, limits).check_module(module, inputs, what)


def collectives(module: Module) -> dict[str, int]:
    """The number of each collective in a module."""
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_reduce_rms_norm"]
    counts = {name: sum(op.opname == name for op in module.ops()) for name in names}
    return {name: count for name, count in counts.items() if count}


def plan_file(folder: Path, *rows: str) -> Path:
    """The path of a plan with these rows."""
    path = folder / "plan.txt"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


_PRODUCTS = ("linear", "matmul", "gated_mlp", "experts", "conv", "embedding", "gather")
_MOVES = ("transpose", "reshape", "squeeze", "unsqueeze", "expand", "slice", "dequantize", "cast")
_MOVES += ("shard_slice", "all_gather")


def share_of_products(module: Module, ranks: int) -> float:
    """The share of the bytes of weights of products and lookups that are sharded, among those with
    a dimension of an element or more for every rank."""
    weights: dict[Weight, None] = {}
    for op in module.ops():
        if op.opname in _PRODUCTS:
            matrices = (weight_of(value) for value in op.operands)
            weights.update(dict.fromkeys(w for w in matrices if w is not None and w.type.ndim > 1))
    types = [weight.type.global_type for weight in weights]
    large = [type for type in types if max(int(str(size)) for size in type.shape) >= ranks]
    assert large, "the module has no weights of products"
    sizes = [dtype(type.dtype).nbytes(math.prod(map(int, map(str, type.shape)))) for type in large]
    shards = [size for size, type in zip(sizes, large, strict=True) if type.sharded]
    return sum(shards) / sum(sizes)


def weight_of(value: Value) -> Weight | None:
    """The weight of numbers that a value is, as it is, moved or dequantized."""
    while not isinstance(value, Weight):
        op = value.producer
        if op is None or op.opname not in _MOVES:
            return None
        value = op.operands[0]
    return None if value.type.dtype in ("i32", "i64", "bool") else value


def sent_bytes(module: Module, ranks: int) -> float:
    """The bytes that one rank sends in one run of a sharded module, by ring algorithms."""
    mesh = module.mesh
    sizes = LocalSizes(mesh, typical_sizes(module))
    sent = messages(module.main, sizes, default_topology())
    assert all(message.group_size == ranks for message in sent)
    return sum(message.sent for message in sent)
