"""Tables of 64-bit keys, All2AllDenseEmbedding over ranks, and a dictionary to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irc
import irc.passes
from irc.frontends import huggingface
from irc.frontends.layers import All2AllDenseEmbedding, Table
from irc.frontends.layers.index import RESERVED
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.weights.safetensors import write_tensors

assert irc.passes  # importing it registers the passes
Array = np.ndarray[Any, Any]
EXTREMES = (-(2**63), 2**63 - 2, -1, 0, 2**32, 2**31 - 1)
KEYS = irc.Spec("i64", ("N",))


def drawn(rng: np.random.Generator, count: int, width: int) -> Table:
    """Distinct random keys of 64 bits, extremes among them, and rows that all differ."""
    keys = rng.integers(-(2**63), 2**63 - 1, count + count // 8 + 8)
    keys = np.setdiff1d(keys, EXTREMES)[: count - len(EXTREMES)]
    keys = rng.permutation(np.append(keys, EXTREMES))
    return Table(keys, rng.permutation(count * width).reshape(count, width).astype(np.float32) + 1)


def asked(rng: np.random.Generator, table: Table, count: int, hot: int = 1) -> Array:
    """Keys to look up: a third are the first `hot` keys of the table, a tenth neighbours of keys,
    which hardly ever have rows, and one is reserved."""
    keys = rng.choice(table.keys, count)
    keys[: count // 3] = rng.choice(table.keys[:hot], count // 3)
    keys[count // 3 : count // 3 + count // 10] ^= 1
    keys[-1:] = RESERVED
    return rng.permutation(keys)


def looked_up(table: Table, keys: Array, otherwise: Any = 0.0) -> Array:
    """The rows by a plain dictionary; `otherwise` is a row, or a function from an unseen key."""
    rows = dict(zip(table.keys.tolist(), table.rows, strict=True))
    out = np.empty((keys.size, table.rows.shape[1]), table.rows.dtype)
    for place, key in enumerate(keys.reshape(-1).tolist()):
        unseen: Any = otherwise(key) if callable(otherwise) else otherwise
        out[place] = rows.get(key, unseen)
    return out.reshape(*keys.shape, -1)


def layer_for(table: Table, gpus: int, slots: Sequence[int] = (), **options: Any) -> Any:
    """The layer with a table's size, with a few rows to spare; dynamic where there are no slots."""
    vocabulary, width = -(-(len(table.keys) + 3) // gpus), table.rows.shape[1]
    slot_num, nnz = slots or (1, 1)
    options |= {"dynamic_input": not slots, "gpu_num": gpus}
    return All2AllDenseEmbedding(vocabulary, width, slot_num, nnz, **options)


def bound(
    layer: Any, arrays: dict[str, Array], folder: Path, spec: irc.Spec = KEYS, most: int = 840 * 40
) -> Module:
    """The traced layer, its weights in a file of the folder."""
    size = str(spec.shape[0])
    module = irc.trace(layer, {"keys": spec}, {size: (1, 840, most)})
    return bind(module, arrays, folder)


def bind(module: Module, arrays: dict[str, Array], folder: Path) -> Module:
    """The module with these weights, in a file of the folder."""
    write_tensors(folder / "model.safetensors", arrays)
    return huggingface.bind(module, folder)


def spread(module: Module, ranks: int, options: str = "scheme=kd") -> Module:
    """The module over data-parallel ranks, in the local view; `options` of rewrite-embeddings."""
    if ranks > 1:
        rewrite = f"rewrite-embeddings{{{options}}}"
        run_pipeline(module, f'shard{{mesh="dp={ranks}"}}, {rewrite}, localize, cse, dce')
    return module
