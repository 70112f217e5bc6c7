"""Lookups to rewrite: a module per sharding of ids and result, with its table in a file.

`replicated`: the result is replicated. `scattered`: the ids are replicated, and the result is
sharded along their second dimension. `sharded`: ids and result are sharded along the first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import irc.passes
from irc.backends.reference import evaluate_ranks
from irc.ir.core import Module
from irc.ir.dtypes import dtype_of, numpy_dtype
from irc.pipeline import Step, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.text import parse_module
from tests.fresh import fresh

assert irc.passes
Array = np.ndarray[Any, Any]
SCHEMES = {
    "replicated": ("R", "RA", "CA", "KA"),
    "scattered": ("R", "RS", "CS", "KS"),
    "sharded": ("R", "RSD", "CD", "KD"),
}
PAIRS = [(wanted, scheme) for wanted, schemes in SCHEMES.items() for scheme in schemes]
ADDING = ("RA", "RS", "RSD")  # these add zeros of other ranks, and -0.0 + 0.0 is 0.0
GROUP_SIZES = (2, 3, 4, 8)
_BODIES = {
    "replicated": """
    %e = embedding %ids, @t : {dt}[{b}, {s}, {d}]{{sum tp}}
    %y = all_reduce %e {{axis="tp"}} : {dt}[{b}, {s}, {d}]""",
    "scattered": """
    %e = embedding %ids, @t : {dt}[{b}, {s}, {d}]{{sum tp}}
    %y = reduce_scatter %e {{axis="tp", dim=1}} : {dt}[{b}, {s}@tp, {d}]""",
    "sharded": """
    %all = all_gather %ids {{axis="tp", dim=0}} : {it}[{b}, {s}]
    %e = embedding %all, @t : {dt}[{b}, {s}, {d}]{{sum tp}}
    %y = reduce_scatter %e {{axis="tp", dim=0}} : {dt}[{b}@tp, {s}, {d}]""",
}


@dataclass(frozen=True)
class Lab:
    """One lookup: a table [V, D] in a file of `folder`, and the shape of the ids [B, S]."""

    folder: Path
    table: Array
    shape: tuple[int, int]
    wanted: str = "replicated"
    group_size: int = 2
    index: str = "i32"
    mesh: str = ""

    def module(self) -> Module:
        """The module after shard: rows are sharded, and a collective completes the partial sum."""
        path = self.folder / "table.safetensors"
        write_table(path, self.table)
        b, s = self.shape
        dt, d = dtype_of(self.table), self.table.shape[1]
        body = _BODIES[self.wanted].format(dt=dt, it=self.index, b=b, s=s, d=d)
        ids = f"{self.index}[{b}{'@tp' if self.wanted == 'sharded' else ''}, {s}]"
        result = body.rpartition(" : ")[2]
        return parse_module(f"""
module @m mesh({self.mesh or f"tp={self.group_size}"}) {{
  file @ckpt = "{path}"
  weight @t : {dt}[{self.table.shape[0]}@tp, {self.table.shape[1]}] = @ckpt["t"]
  func @forward(%ids: {ids}) -> (y: {result}) {{{body}
    return %y
  }}
}}""")

    def rewritten(self, scheme: str, options: str = "") -> tuple[Module, Step]:
        """The module in another scheme, in the global view, and the step of the pass."""
        module = self.module()
        text = f'rewrite-embeddings{{scheme="{scheme}"{options}}}'
        return module, run_pipeline(module, text, [VerifyEach()])[0]


def localized(module: Module) -> Module:
    """The module in the local view, verified after every pass."""
    run_pipeline(module, "localize, cse, dce", [VerifyEach()])
    return module


def write_table(path: Path, table: Array, name: str = "t") -> None:
    """One tensor in the safetensors format."""
    kind = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64"}[dtype_of(table)]
    entry = {"dtype": kind, "shape": list(table.shape), "data_offsets": [0, table.nbytes]}
    text = json.dumps({name: entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + table.tobytes())


def distinct(rows: int, width: int, dtype: str = "f32") -> Array:
    """A table of distinct elements, as far as the dtype permits."""
    return np.arange(1, rows * width + 1).reshape(rows, width).astype(numpy_dtype(dtype))


def any_bits(rows: int, width: int, dtype: str = "f32") -> Array:
    """A table of any bits, with infinities, NaN, zeros of both signs and denormals."""
    numpy: Any = numpy_dtype(dtype)
    unsigned = np.dtype(f"u{numpy.itemsize}")
    bits = fresh(6).integers(0, 1 << 8 * unsigned.itemsize, (rows, width), unsigned)
    ends = np.array([0, -0.0, np.inf, -np.inf, np.nan], numpy).view(unsigned)
    special = np.append(ends, [1, ends[1] + 1]).astype(unsigned)
    places = fresh(7).random((rows, width)) < 1 / 3
    table = np.where(places, fresh(8).choice(special, (rows, width)), bits).view(numpy)
    if dtype != "f32":  # the reference computes these in f32, which makes NaN quiet
        with np.errstate(invalid="ignore"):
            table[np.isnan(table)] = np.nan
    return table


def looked_up(table: Array, ids: Array) -> Array:
    """The result of every scheme: rows of the table, zeros for out-of-range ids."""
    rows = np.zeros((*ids.shape, table.shape[1]), table.dtype)
    for place, i in np.ndenumerate(ids):
        if 0 <= i < len(table):
            rows[place] = table[i]
    return rows


def drawn(rng: np.random.Generator, rows: int, shape: Sequence[int], index: str = "i32") -> Array:
    """Random ids, a few of them out of range."""
    ids = rng.integers(-2, rows + 3, tuple(shape)).astype(numpy_dtype(index))
    limits = np.iinfo(np.int64 if index == "i64" else np.int32)
    for extreme in (limits.min, limits.max):
        if ids.size and rng.random() < 0.3:
            ids.flat[rng.integers(ids.size)] = extreme
    return ids


def bits(array: Array) -> Array:
    """The array as integers, so that NaN equals itself and -0.0 does not equal 0.0."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same(got: Array, wanted: Array, what: object, scheme: str = "R") -> None:
    """Raise unless all bits agree; where the scheme adds, up to the sign of zero and NaN bits."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    if scheme in ADDING:
        got, wanted = (canonical(array) for array in (got, wanted))
    assert np.array_equal(bits(got), bits(wanted)), what


def canonical(array: Array) -> Array:
    """One zero and one NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = array.astype(np.float32) + np.float32(0)
    return np.where(np.isnan(wide), np.float32("nan"), wide)


def on_ranks(
    module: Module, ids: Array, change: Callable[[int, str, Array], Array] | None = None
) -> list[dict[str, Array]]:
    """The results of every rank; `change(rank, name, array)` may change its weights first."""
    from irc.weights.checkpoint import Reader

    given: dict[str, list[Array]] = {}
    if change is not None:
        reader = Reader(module)
        for name, weight in module.weights.items():
            ranks = range(module.mesh.ranks)
            given[name] = [change(r, name, np.array(reader.read(weight, r))) for r in ranks]
    weights: Mapping[str, Any] | None = given or None
    return evaluate_ranks(module, {"ids": ids}, weights=weights)
