"""`random_inputs`: inputs for a first run of a module, and for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ..analysis.sizes import LocalSizes, typical_sizes
from ..backends.base import ports_of
from ..ir.core import Module
from ..ir.dims import Dim
from ..ir.dtypes import dtype
from .inputs import cache_range, vocabulary

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

_IMPLIED = ("positions", "past_lengths", "lengths")  # inputs that `complete` adds


def random_inputs(module: Module, seed: int, sizes: Mapping[str, int] | None = None) -> Arrays:
    """Random arrays for the inputs of the main function, at these sizes of their symbols, or the
    typical ones.

    Floats are normal, ids of a table any of its rows, other integers 0 or 1. Of a language model
    they are the tokens and the last positions, whose logits are computed.
    """
    random = np.random.default_rng(seed)
    ports = ports_of(module.main)
    symbols = {
        s for p in ports.inputs for dim in p.shape if isinstance(dim, Dim) for s in dim.symbols()
    }
    chosen_sizes = dict.fromkeys(symbols, 1) | typical_sizes(module, **(sizes or {}))
    local = LocalSizes(module.mesh, chosen_sizes)
    rows = table_rows(module)
    is_language_model = "input_ids" in {port.name for port in ports.inputs} and bool(ports.states)
    if is_language_model:
        rows["input_ids"] = vocabulary(ports) or rows.get("input_ids", 2)
    arrays: Arrays = {}
    for port in ports.inputs:
        if is_language_model and port.name in _IMPLIED:
            continue
        kind, shape = dtype(port.dtype), tuple(map(local.dim, port.shape))
        if is_language_model and len(shape) == 2:
            most = cache_range(ports, module.dims)[1]
            shape = (shape[0], min(shape[1], most or shape[1]))
        drawn: Any = random.standard_normal(shape) if kind.is_float else None
        if drawn is None:
            drawn = random.integers(0, rows.get(port.name, 2), shape)
        arrays[port.name] = np.asarray(drawn).astype(kind.numpy)
    if is_language_model and "logit_positions" in arrays:
        last, asked = arrays["input_ids"].shape[1], arrays["logit_positions"]
        count = min(last, asked.shape[1])
        asked = np.zeros((len(asked), count), asked.dtype)
        arrays["logit_positions"] = asked + np.arange(last - count, last, dtype=asked.dtype)
    return arrays


def complete_inputs(module: Module, seed: int, sizes: Mapping[str, int]) -> Arrays:
    """`random_inputs`, and what a language model takes beside its tokens: none are before them."""
    arrays = random_inputs(module, seed, sizes)
    local = LocalSizes(module.mesh, typical_sizes(module, **sizes))
    for port in ports_of(module.main).inputs:
        if port.name not in arrays:
            shape = tuple(map(local.dim, port.shape))
            fill = arrays["input_ids"].shape[-1] if port.name == "lengths" else 0
            arrays[port.name] = np.full(shape, fill, dtype(port.dtype).numpy)
    return arrays


def table_rows(module: Module) -> dict[str, int]:
    """By input, the fewest rows of the tables in which it is looked up."""
    sizes: dict[str, int] = {}
    for op in module.main:
        if op.opname == "embedding" and op.operands[0] in module.main.args:
            name, size = str(op.operands[0].name), op.operands[1].type.shape[0]
            if isinstance(size, int):
                sizes[name] = min(size, sizes.get(name, size))
    return sizes
