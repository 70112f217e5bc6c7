"""The reference's answer to a prompt, with which a runtime compares what its engines compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.reference import evaluate
from irc.backends.tensorrt.ranges import number
from irc.core import Module
from irc.dims import Dim, DimLike
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.report import weight_bytes

SMALL = 256_000_000  # bytes of weights up to which the answer is computed unless asked otherwise
COUNT = 16  # of the largest logits that are stored
# Of the largest logit: what engines may differ by, which sum in another order and a narrower dtype.
TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 5e-2}
_PROMPT = 8  # tokens


def self_test(
    module: Module, base: Path | str | None, wanted: bool | None
) -> dict[str, Any] | None:
    """{ids, top, logits, tolerance} of a language model: the largest logits after a prompt.

    None where it is not wanted, or the module gives no logits. `wanted` None: where weights are
    small.
    """
    if wanted and not _speaks(module):
        raise Error(
            "there is nothing to test: the module gives no logits after input_ids; leave "
            "--self-test out"
        )
    if wanted is False or not _speaks(module):
        return None
    if wanted is None and weight_bytes(module) > SMALL:
        return None
    kind, shape = _logits(module)
    vocabulary = shape[-1]
    assert isinstance(vocabulary, int)
    ids = [(7 * i + 3) % vocabulary for i in range(_count(module))]
    logits = evaluate(module, _inputs(module, ids), base)["logits"]
    last = np.asarray(logits[0, -1], np.float32)
    top = np.argsort(-last, kind="stable")[:COUNT]
    return {
        "ids": ids,
        "top": top.tolist(),
        "logits": [float(each) for each in last[top]],
        "tolerance": TOLERANCE.get(kind, TOLERANCE["bf16"]) * max(1.0, float(np.abs(last).max())),
    }


def _logits(module: Module) -> tuple[str, tuple[Any, ...]]:
    names = module.main.result_names()
    type = module.main.result_layouts()[names.index("logits")]
    return type.dtype, type.shape


def _count(module: Module) -> int:
    """How many tokens the prompt has: as many as fit the caches, and a multiple of what ranks
    share."""
    (ids,) = [arg for arg in module.main.args if arg.name == "input_ids"]
    least = _least(module.main.argument_layout(ids).shape[1])
    found = [op.operands[0].type.shape[2] for op in module.ops() if op.opname == "cache_update"]
    most = min((dim for dim in found if isinstance(dim, int)), default=_PROMPT)
    return max(min(_PROMPT, most) // least, 1) * least


def _speaks(module: Module) -> bool:
    names = module.main.result_names()
    inputs = {str(arg.name) for arg in module.main.args}
    if "logits" not in names or not {"input_ids", "past_lengths"} <= inputs:
        return False
    return isinstance(_logits(module)[1][-1], int)


def _inputs(module: Module, ids: list[int]) -> dict[str, np.ndarray]:
    """The arguments of a first call of one row, or of as few rows as ranks share."""
    args = {str(arg.name): module.main.argument_layout(arg) for arg in module.main.args}
    batch = args["input_ids"].shape[0]
    rows = _least(batch)
    known = {
        "input_ids": np.tile(np.array(ids, np.int32), (rows, 1)),
        "positions": np.tile(np.arange(len(ids), dtype=np.int32), (rows, 1)),
        "past_lengths": np.zeros(rows, np.int32),
        "logit_positions": np.full((rows, 1), len(ids) - 1, np.int32),
    }
    found: dict[str, np.ndarray] = {}
    for name, type in args.items():
        if name in known:
            found[name] = known[name]
            continue
        shape = tuple(_least(dim) for dim in type.shape)
        found[name] = np.zeros(shape, numpy_dtype(type.dtype))
    return found


def _least(dim: DimLike) -> int:
    """A dimension where every symbol is 1."""
    return number(dim, dict.fromkeys(dim.symbols(), 1)) if isinstance(dim, Dim) else dim
