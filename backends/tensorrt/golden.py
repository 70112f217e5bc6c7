"""The reference's answers to prompts, which the runtime compares with those of its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.artifact.manifest import Progress
from irc.artifact.report import weight_bytes
from irc.backends.reference import evaluate
from irc.backends.reference.evaluate import Run
from irc.backends.reference.weights import Weights
from irc.backends.tensorrt.ranges import smallest
from irc.errors import Error
from irc.ir.core import Module, Value
from irc.ir.dims import Dim
from irc.ir.dtypes import numpy_dtype
from irc.ir.result_names import NEXT_TOKENS
from irc.ir.types import Axes
from irc.ops import AllGather, Argmax, Call, Topk
from irc.ops.fused_attention import cache_writes

SMALL = 256_000_000  # bytes of weights up to which the answer is computed by default
COUNT = 16  # of the largest logits that are stored
# Largest difference to an engine, which sums in another order, relative to the largest logit.
TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 5e-2}
_PROMPT = 8  # tokens
_WANTED, _TRIES = 3, 12  # prompts with a clear answer, where only tokens can be compared


def is_left_out(module: Module, wanted: bool | None) -> bool:
    """Whether an answer could be stored, and is not by default because computing it takes long."""
    return wanted is None and weight_bytes(module) > SMALL and _is_generator(module)


def self_test(
    module: Module, base: Path | str | None, wanted: bool | None, progress: Progress
) -> dict[str, Any] | None:
    """The largest logits after a prompt, {ids, top, logits, tolerance}; for a module that returns
    tokens in place of logits, prompts with the next token, {prompts: [{ids, token}]}.

    Only prompts whose token leads by more than rounding can change are stored. None if the module
    has no such results, or nothing is `wanted` (None: only if the weights are small).
    """
    if wanted is False or (wanted is None and weight_bytes(module) > SMALL):
        return None
    found = None
    if _is_generator(module):
        progress("running the reference for the self-test", 0.0)
        has_logits = "logits" in module.main.result_names()
        found = _logits(module, base) if has_logits else _tokens(module, base)
    if wanted and found is None:
        raise Error(
            "there is nothing to test: the module returns no logits for input_ids, and no tokens "
            "that are clearly likelier than others; leave --self-test out"
        )
    return found


def _is_generator(module: Module) -> bool:
    """Whether it continues token ids, from caches that may hold some."""
    inputs = {str(arg.name) for arg in module.main.args}
    results = {"logits", NEXT_TOKENS} & {*module.main.result_names()}
    return {"input_ids", "past_lengths"} <= inputs and bool(results)


def _logits(module: Module, base: Path | str | None) -> dict[str, Any] | None:
    at = module.main.result_names().index("logits")
    type = [value.type.global_type for value in module.main.returned][at]
    vocabulary = type.shape[-1]
    if not isinstance(vocabulary, int):
        return None
    ids = next(_prompts(module, vocabulary))
    logits = evaluate(module, _inputs(module, ids), base)["logits"]
    last = np.asarray(logits[0, -1], np.float32)
    top = np.argsort(-last, kind="stable")[:COUNT]
    return {
        "ids": ids,
        "top": top.tolist(),
        "logits": [float(each) for each in last[top]],
        "tolerance": _tolerance(type.dtype, float(np.abs(last).max())),
    }


def _tokens(module: Module, base: Path | str | None) -> dict[str, Any] | None:
    """Prompts with their next tokens, where no rounding makes another one the likeliest."""
    chosen = _chosen_from(module)
    if chosen is None:
        return None
    logits, axes = chosen
    shard = logits.type.shape[-1]
    assert isinstance(shard, int)
    # tokens that exist: the shards of ranks may end with padding
    vocabulary = (shard - 1) * module.mesh.group_size(axes) + 1
    group = module.mesh.groups(axes)[-1] if axes else [-1]
    weights, found = Weights(module, base), list[dict[str, Any]]()
    for ids in map(list, dict.fromkeys(map(tuple, _prompts(module, vocabulary)))):
        run = Run(module, _inputs(module, ids), weights=weights, watched=(logits,))
        last = np.concatenate([run.seen[logits][rank][-1, -1] for rank in group], dtype=np.float32)
        token, (second, first) = int(last.argmax()), np.sort([-np.inf, *last])[-2:]
        largest = float(np.abs(last[np.isfinite(last)]).max(initial=0))
        returned = run.joined()[NEXT_TOKENS][-1, -1]
        if returned == token and first - second > 2 * _tolerance(logits.type.dtype, largest):
            found.append({"ids": ids, "token": token})
        if len(found) == _WANTED:
            break
    return {"prompts": found} if found else None


def _tolerance(dtype: str, largest: float) -> float:
    """The allowed difference of logits whose largest magnitude is `largest`."""
    return TOLERANCE.get(dtype, TOLERANCE["bf16"]) * max(1.0, largest)


def _prompts(module: Module, vocabulary: int) -> Iterator[list[int]]:
    """Prompts, from the longest that fits one call and the caches to the shortest, repeatedly."""
    (arg,) = [arg for arg in module.main.args if arg.name == "input_ids"]
    dim = arg.type.global_type.shape[1]
    unit = smallest(dim)  # sharded tokens: a multiple
    limits = [write.capacity for op in module.ops() for write in cache_writes(op)]
    names = dim.symbols() if isinstance(dim, Dim) else ()
    limits += [unit * module.dims[name][2] for name in names if name in module.dims]
    limits += [dim, _PROMPT]
    longest = max(min(each for each in limits if isinstance(each, int)) // unit, 1)
    for turn in range(_TRIES):
        count = (longest - turn % longest) * unit
        yield [((7 + 2 * turn) * i + 3) % vocabulary for i in range(count)]


def first_call(ids: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    """The plain inputs that a first call with these ids in every row may have."""
    return {
        "input_ids": np.tile(np.array(ids, np.int32), (rows, 1)),
        "positions": np.tile(np.arange(len(ids), dtype=np.int32), (rows, 1)),
        "past_lengths": np.zeros(rows, np.int32),
        "lengths": np.full(rows, len(ids), np.int32),
        "logit_positions": np.full((rows, 1), len(ids) - 1, np.int32),
    }


def _inputs(module: Module, ids: list[int]) -> dict[str, np.ndarray]:
    """The arguments of a first call with these ids, of as few rows as possible."""
    args = {str(arg.name): arg.type.global_type for arg in module.main.args}
    known = first_call(ids, smallest(args["input_ids"].shape[0]))
    zeros = {
        name: np.zeros(tuple(smallest(dim) for dim in type.shape), numpy_dtype(type.dtype))
        for name, type in args.items()
        if name not in known
    }
    return {name: value for name, value in (known | zeros).items() if name in args}


def _chosen_from(module: Module) -> tuple[Value, Axes] | None:
    """The logits [B, S, V] whose largest is the result `next_tokens`, and the mesh axes that shard
    them; None if they are not found."""
    tokens = module.main.returned[module.main.result_names().index(NEXT_TOKENS)]
    axes: Axes = ()
    while not isinstance(tokens.producer, Argmax | Topk):
        op = tokens.producer
        if op is None or not op.operands:
            return None
        # a gather_elements looks up its last operand
        within = isinstance(op, Call)
        tokens = op.callee.returned[op.results.index(tokens)] if within else op.operands[-1]
    logits = tokens.producer.x
    if isinstance(logits.producer, AllGather) and isinstance(logits.producer.x.producer, Topk):
        logits, axes = logits.producer.x.producer.x, logits.producer.axes
    static = logits.type.ndim == 3 and isinstance(logits.type.shape[-1], int)
    return (logits, axes) if static else None
