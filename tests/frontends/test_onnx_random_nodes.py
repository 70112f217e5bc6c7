"""Random nodes: irc agrees with ONNX Runtime wherever ONNX's own reference does as well.

They are of operators that have more cases than ONNX's backend tests do: of broadcasting, axes,
ends, extreme numbers and masks.

Every session draws others. Operands are inputs of fixed or symbolic sizes, or constants, so that
nodes are read, folded and written to a file. A refusal is an Error; a number is right.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from irc.backends.reference import evaluate
from irc.errors import Error
from tests.fresh import fresh
from tests.frontends.onnx_models import i64, kind_of, model, on_emitted, on_ort, read, saved

pytestmark = pytest.mark.slow
SECONDS = 12.0
NODES = 900
Array = Any
Rng = np.random.Generator

FLOATS = {"f32": np.float32, "f16": np.float16, "f64": np.float64}
WHOLE = {"i64": np.int64, "i32": np.int32, "u8": np.uint8, "i8": np.int8}
UNARY = (
    "Abs Neg Sign Relu Exp Sqrt Log Sin Cos Tanh Sigmoid Erf Round Floor Ceil Reciprocal Softplus "
    "Gelu IsNaN IsInf Elu Selu LeakyRelu HardSwish HardSigmoid Softsign Identity Mish Celu"
)
BINARY = "Add Sub Mul Equal Less LessOrEqual Greater GreaterOrEqual Min Max"
REDUCTIONS = "Sum Prod Min Max Mean L1 L2 SumSquare LogSum LogSumExp"
CLOSE = {"f16": 2e-2, "f32": 1e-4, "f64": 1e-4}


@dataclass(frozen=True)
class Drawn:
    """A node and its operands; those called in `known` are always constants of the file."""

    kind: str
    operands: Mapping[str, Array]
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    known: str = ""
    outputs: int = 1


def shape(rng: Rng, least: int = 0, most: int = 3) -> tuple[int, ...]:
    return tuple(rng.integers(1, 5, rng.integers(least, most + 1)).tolist())


def floats(
    rng: Rng, sizes: tuple[int, ...], special: bool = True, kinds: str = "f32 f32 f16 f64"
) -> Array:
    kind = FLOATS[rng.choice(kinds.split())]
    found = np.asarray(rng.normal(0, 2, sizes).round(2), kind)
    if special and rng.random() < 0.2:
        odd = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, np.finfo(kind).min], kind))
        found = np.where(rng.random(sizes) < 0.3, odd, found)
    return found


def whole(rng: Rng, sizes: tuple[int, ...], kinds: str = "i64 i64 i32 u8 i8") -> Array:
    kind = WHOLE[rng.choice(kinds.split())]
    info = np.iinfo(kind)
    found = rng.integers(max(info.min, -9), 10, sizes).astype(kind)
    if rng.random() < 0.3:
        found = np.where(rng.random(sizes) < 0.3, rng.choice([info.min, info.max]), found)
    return found.astype(kind)


def numbers(rng: Rng, sizes: tuple[int, ...]) -> Array:
    return floats(rng, sizes) if rng.random() < 0.6 else whole(rng, sizes)


def pick(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def broadcast(rng: Rng, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another."""
    kept = tuple(1 if rng.random() < 0.25 else n for n in sizes)
    return kept[int(rng.integers(0, len(kept) + 1)) :] if rng.random() < 0.4 else kept


def like(rng: Rng, x: Array, sizes: tuple[int, ...]) -> Array:
    """Numbers of the dtype of another array."""
    if x.dtype == bool:
        return rng.random(sizes) < 0.5
    if x.dtype.kind == "f":
        return floats(rng, sizes, kinds=kind_of(x))
    return whole(rng, sizes, kind_of(x))


def places(rng: Rng, size: int, sizes: tuple[int, ...]) -> Array:
    """Indices of a dimension, some from its end."""
    low = -size if rng.random() < 0.6 else 0
    return rng.integers(low, size, sizes).astype(pick(rng, np.int64, np.int64, np.int32))


def unary(rng: Rng) -> Drawn:
    kind = pick(rng, *UNARY.split())
    is_any = kind in ("Abs", "Neg", "Sign", "Relu", "Identity")
    x = numbers(rng, shape(rng)) if is_any else floats(rng, shape(rng))
    return Drawn(kind, {"x": np.abs(x) if kind in ("Sqrt", "Log") else x})


def binary(rng: Rng) -> Drawn:
    kind = pick(rng, *BINARY.split())
    x = numbers(rng, sizes := shape(rng))
    return Drawn(kind, {"x": x, "y": like(rng, x, broadcast(rng, sizes))})


def divided(rng: Rng) -> Drawn:
    """Div and Mod; nothing is divided by 0, nor the smallest integer by -1."""
    x = numbers(rng, sizes := shape(rng))
    y = like(rng, x, broadcast(rng, sizes))
    if x.dtype.kind == "f":
        return Drawn("Div", {"x": x, "y": y})
    y = np.where((y == 0) | (y == np.array(-1).astype(y.dtype)), y.dtype.type(3), y)
    kind, words = pick(rng, ("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1}))
    return Drawn(kind, {"x": x, "y": y}, words)


def reduced(rng: Rng) -> Drawn:
    kind = "Reduce" + pick(rng, *REDUCTIONS.split())
    sizes = shape(rng)
    x = np.asarray(rng.uniform(0.5, 3, sizes).round(2), pick(rng, np.float32, np.float64))
    if rng.random() < 0.3 and "Log" not in kind and "L2" not in kind:
        x = rng.integers(1, 4, sizes).astype(pick(rng, np.int64, np.int32))
    words = {"keepdims": int(rng.integers(2)), "noop_with_empty_axes": int(rng.integers(2))}
    if rng.random() < 0.4:
        return Drawn(kind, {"x": x}, words)
    axes = [i - pick(rng, 0, len(sizes)) for i in range(len(sizes)) if rng.random() < 0.5]
    return Drawn(kind, {"x": x, "axes": i64(*axes)}, words, known="axes")


def sliced(rng: Rng) -> Drawn:
    sizes = shape(rng, 1)
    axes = [i for i in range(len(sizes)) if rng.random() < 0.7] or [0]
    ends = [-(1 << 63), -(1 << 31), (1 << 31) - 1, (1 << 63) - 1, *range(-7, 8)]
    starts, stops = (i64(*(pick(rng, *ends) for _ in axes)) for _ in range(2))
    steps = i64(*(pick(rng, 1, 1, 2, -1, -2, 3) for _ in axes))
    axes = [axis - pick(rng, 0, len(sizes)) for axis in axes]
    x = numbers(rng, sizes)
    return Drawn(
        "Slice", {"x": x, "s": starts, "e": stops, "a": i64(*axes), "t": steps}, {}, "seat"
    )


def gathered(rng: Rng) -> Drawn:
    x = numbers(rng, sizes := shape(rng, 1))
    axis = int(rng.integers(-len(sizes), len(sizes)))
    if rng.random() < 0.5:
        return Drawn(
            "Gather", {"x": x, "i": places(rng, sizes[axis], shape(rng, 0, 2))}, {"axis": axis}
        )
    inner = list(sizes)
    inner[axis] = int(rng.integers(1, 4))
    return Drawn(
        "GatherElements", {"x": x, "i": places(rng, sizes[axis], (*inner,))}, {"axis": axis}
    )


def ranged(rng: Rng) -> Drawn:
    kind = pick(rng, np.float32, np.float64, np.int64, np.int32)
    step = pick(rng, 1, 2, -1, 3) if kind in (np.int64, np.int32) else pick(rng, 0.1, 0.3, -0.25, 1)
    first = rng.integers(-3, 3)
    last = first + rng.integers(-2, 8) * step
    words = {"a": first, "b": last, "c": step}
    return Drawn("Range", {name: np.array(n, kind) for name, n in words.items()}, {}, known="abc")


def clipped(rng: Rng) -> Drawn:
    x = numbers(rng, shape(rng))
    bounds = {name: like(rng, x, ()) for name in ("low", "high") if rng.random() < 0.8}
    return Drawn("Clip", {"x": x, **bounds}) if "low" in bounds else Drawn("Clip", {"x": x})


def ordered(rng: Rng) -> Drawn:
    sizes = shape(rng, 1)
    count = int(np.prod(sizes))
    x = rng.permutation(count).reshape(sizes).astype(pick(rng, np.float32, np.int64))
    axis = int(rng.integers(-len(sizes), len(sizes)))
    kind = pick(rng, "ArgMax", "ArgMin", "TopK", "CumSum")
    if kind == "CumSum":
        words = {"exclusive": int(rng.integers(2)), "reverse": int(rng.integers(2))}
        return Drawn(kind, {"x": x, "a": np.array(axis)}, words, known="a")
    if kind == "TopK":
        k = i64(int(rng.integers(1, sizes[axis] + 1)))
        words = {"axis": axis, "largest": int(rng.integers(2))}
        return Drawn(kind, {"x": x, "k": k}, words, known="k", outputs=2)
    words = {name: int(rng.integers(2)) for name in ("keepdims", "select_last_index")}
    return Drawn(kind, {"x": x}, {"axis": axis, **words})


def moved(rng: Rng) -> Drawn:
    x = numbers(rng, sizes := shape(rng, 1))
    axis, n = int(rng.integers(-len(sizes), len(sizes))), len(sizes)
    return pick(
        rng,
        Drawn("Transpose", {"x": x}, {"perm": rng.permutation(n).tolist()}),
        Drawn("Flatten", {"x": x}, {"axis": axis}),
        Drawn("Split", {"x": x}, {"axis": axis, "num_outputs": 1}),
        Drawn("CastLike", {"x": x, "y": np.zeros(1, np.float32)}),
        Drawn("Concat", {"x": x, "y": like(rng, x, sizes)}, {"axis": axis}),
        Drawn("Tile", {"x": x, "r": rng.integers(1, 3, n)}, known="r"),
        Drawn("Expand", {"x": x, "s": i64(2, *sizes)}, known="s"),
        Drawn("Unsqueeze", {"x": x, "a": i64(axis)}, known="a"),
        Drawn("Squeeze", {"x": x.reshape(1, *sizes), "a": i64(0)}, known="a"),
        Drawn("Reshape", {"x": x, "s": i64(-1)}, known="s"),
        Drawn("Pad", {"x": x, "p": rng.integers(-1, 3, 2 * n)}, known="p"),
        Drawn("Shape", {"x": x}, {"start": axis}),
        Drawn("Size", {"x": x}),
        Drawn("Trilu", {"x": x[None], "k": np.array(axis)}, {"upper": n % 2}, known="k"),
    )


def attended(rng: Rng) -> Drawn:
    b, h, s, t = rng.integers(1, 4, 4).tolist()
    found = {
        n: rng.normal(size=(b, h, m, 8)).astype(np.float32)
        for n, m in zip("qkv", (s, t, t), strict=True)
    }
    mask = rng.random((b, 1, s, t)) < 0.6
    low = pick(rng, np.finfo(np.float32).min, -1e4, -np.inf)
    if rng.random() < 0.3:
        mask[..., :, 0] = True  # bools that hide every key
        return Drawn("Attention", {**found, "m": mask})
    mask[..., :, 0] |= low == -np.inf  # infinities that do: witnesses differ
    return Drawn("Attention", {**found, "m": np.where(mask, 0, low).astype(np.float32)})


ODD = (binary, divided, reduced, sliced, moved)  # drawn twice as often
DRAWS: list[Callable[[Rng], Drawn]] = [
    *(*ODD, *ODD, unary, gathered, ranged, clipped, ordered, attended)
]


def written(drawn: Drawn, rng: Rng) -> tuple[Any, dict[str, Array]]:
    """A model of one node, and the values of its inputs."""
    inputs: dict[str, Any] = {}
    initial: dict[str, Array] = {}
    constants, symbolic = rng.random() < 0.3, rng.random() < 0.4
    for name, array in drawn.operands.items():
        if constants or name in drawn.known or (not symbolic and rng.random() < 0.2):
            initial[name] = array
        else:
            sizes = [f"n{n}" if symbolic and 1 < n < 8 else n for n in array.shape]
            inputs[name] = (kind_of(array), sizes)
    outputs = [f"out{i}" for i in range(drawn.outputs)]
    node = helper.make_node(drawn.kind, list(drawn.operands), outputs, **drawn.attributes)
    return model([node], inputs, outputs, initial), {name: drawn.operands[name] for name in inputs}


def tried(call: Callable[[], list[Array]]) -> list[Array] | None:
    """What a witness gives; None where it has no kernel for the node."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [np.asarray(each) for each in call()]
    except Exception:  # of any class: neither is under test
        return None


def witnessed(made: Any, path: Path, given: Mapping[str, Array]) -> list[Array] | None:
    """What ONNX Runtime and ONNX's reference both give; None where they do not."""
    wanted = tried(lambda: on_ort(path, given))
    second = tried(lambda: list(ReferenceEvaluator(made).run(None, dict(given))))
    return wanted if wanted and second and agree(wanted, second) else None


def agree(found: list[Array], wanted: list[Array]) -> bool:
    """Whether results have equal dtypes and shapes, and close numbers."""
    return all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and np.allclose(a, b, *[CLOSE.get(kind_of(a), 0.0)] * 2, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )


def test_random_nodes(tmp_path: Path) -> None:
    rng, end = fresh(), time.monotonic() + SECONDS
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for i in range(NODES):
        if time.monotonic() > end:
            break
        drawn = DRAWS[i % len(DRAWS)](rng)
        made, given = written(drawn, rng)
        path = saved(made, tmp_path)
        wanted = witnessed(made, path, given)
        if wanted is None:
            counts["witnesses differ"] += 1
            continue
        outcome = outcome_of(path, given, wanted, tmp_path)
        counts[outcome] += 1
        if outcome.startswith("wrong"):
            wrong.append(f"{outcome}: {drawn}, inputs {list(given)}, expected {wanted}")
    assert not wrong, "\n".join(wrong)
    assert counts["right"] >= sum(counts.values()) / 3, counts


def outcome_of(path: Path, given: Mapping[str, Array], wanted: list[Array], folder: Path) -> str:
    """What the module of a file gives, and the file that irc writes of it."""
    try:
        module = read(path)
        found = [*evaluate(module, dict(given)).values()]
    except Error:
        return "refused"
    if not agree(found, wanted):
        return f"wrong {found}"
    if not module.main.args:
        return "right"
    try:
        emitted = on_emitted(module, given, folder)
    except Error:
        return "not emitted"
    with np.errstate(over="ignore"):  # halves are computed in f32
        emitted = [a.astype(b.dtype) for a, b in zip(emitted, wanted, strict=True)]
    return "right" if agree(emitted, wanted) else f"wrong when emitted {emitted}"
