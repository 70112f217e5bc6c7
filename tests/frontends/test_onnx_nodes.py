"""Nodes that neither ONNX's backend tests nor the random nodes have: of Microsoft, extremes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from irc.backends.reference import evaluate
from tests.frontends.onnx_models import OPSET, compared, i64, model, on_emitted, read, saved

B, S = "batch", "seq"
SIZES = {B: 3, S: 5, "2*seq": 10}


@dataclass(frozen=True)
class Case:
    """One node over inputs and initializers."""

    kind: str
    inputs: dict[str, Any]  # (dtype, shape)
    initial: dict[str, Any] = field(default_factory=dict[str, Any])
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    order: str = ""  # names of the operands, where they differ from inputs and initial in order
    outputs: int = 1
    opset: int = OPSET
    domain: str = ""

    def __str__(self) -> str:
        words = [self.kind, *map(str, self.attributes.items()), str(self.opset)]
        return " ".join(words + [f"{n}{list(s)}" for n, (_, s) in self.inputs.items()])


def f32(*shape: int) -> Any:
    return ("normal", shape)


X = {"x": ("f32", (B, S, 8))}
IDS = {"ids": ("i64", (B, S))}

CASES = [
    Case("Gelu", X, domain="com.microsoft", opset=17),
    Case("FastGelu", X, {"b": f32(8)}, domain="com.microsoft"),
    Case("BiasGelu", X, {"b": f32(8)}, domain="com.microsoft"),
    Case("QuickGelu", X, domain="com.microsoft", attributes={"alpha": 1.702}),
    Case("FusedMatMul", {**X, "y": ("f32", (B, 6, 8))}, {}, {"transB": 1, "alpha": 0.25},
         domain="com.microsoft"),
    Case("SkipSimplifiedLayerNormalization", {**X, "r": ("f32", (B, S, 8))}, {"s": f32(8)},
         {"epsilon": 1e-3}, domain="com.microsoft"),
    Case("SkipLayerNormalization", {**X, "r": ("f32", (B, S, 8))}, {"s": f32(8), "b": f32(8)},
         domain="com.microsoft"),
    Case("SimplifiedLayerNormalization", X, {"s": f32(8)}, {"epsilon": 1e-3}, opset=17),
    *(Case("RotaryEmbedding", {"x": ("f32", (B, 2, S, 8))}, {"c": f32(64, 4), "s": f32(64, 4)},
           {"interleaved": n}, order="x ids c s", domain="com.microsoft") for n in (0, 1)),
    Case("RotaryEmbedding", {"x": ("f32", (B, S, 16))}, {"c": f32(64, 2), "s": f32(64, 2)},
         {"num_heads": 2, "rotary_embedding_dim": 4, "interleaved": 1}, order="x c s ids"),
    Case("Reshape", {"x": ("f32", ("2*seq", 8))}, {"s": i64(-1, 2, 4)}),
    Case("Split", X, attributes={"axis": 2}, outputs=2, opset=13),
    # operands that ONNX's tests have as inputs, on which the shape depends
    *(Case("Pad", X, {"p": i64(2, 3), "v": np.float32(0), "a": i64(-1)}, {"mode": mode})
      for mode in ("edge", "reflect", "wrap")),
    Case("ScatterND", {"x": ("f32", (8,)), "u": ("f32", (2, 2))},
         {"i": np.arange(4).reshape(2, 2, 1)}, {"reduction": "max"}, order="x i u"),
    *(Case("Resize", {"x": ("f32", (B, 2, 7, 4))}, {"n": i64(3, 9)},
           {"mode": m, "antialias": n, "exclude_outside": 1, "axes": [2, 3]}, order="x   n")
      for m, n in (("linear", 1), ("cubic", 0), ("cubic", 1))),
    *(Case("Resize", {"x": ("f32", (B, S, 3))}, {"n": np.array([1, 2, 1.5], np.float32)},
           {"mode": "nearest", "coordinate_transformation_mode": c, "nearest_mode": m},
           order="x  n")
      for c, m in (("asymmetric", "floor"), ("half_pixel", "round_prefer_ceil"))),
    Case("ReduceL2", X, attributes={"axes": [1], "keepdims": 0}, opset=13),
    Case("MaxPool", {"x": ("i8", (B, 3, 7, "2*seq"))},
         attributes={"kernel_shape": [3, 2], "strides": [1, 2], "auto_pad": "SAME_UPPER"}),
    Case("LayerNormalization", {"x": ("f32", (2, 3, 8))}, {"s": f32(3, 8), "b": f32(8)},
         {"axis": -2}),
    *(Case(k, {"x": ("f32", (B, 3, 7, 8))},
           attributes={"kernel_shape": [3, 2], "strides": [2, 3], **words})
      for k in ("MaxPool", "AveragePool", "LpPool")
      for words in ({"ceil_mode": 1, "pads": [1, 0, 1, 1]}, {"dilations": [2, 3]})),
    *(Case("MaxPool", {"x": ("i8", (B, 3, 7, 8))}, outputs=2, attributes={
        "kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "storage_order": n}) for n in (0, 1)),
    Case("GridSample", {"x": ("f32", (B, 2, 4, S)), "g": ("f32", (B, 2, 6, 2))}, opset=16),
    *(Case("GridSample", {"x": ("f32", (B, 2, 4, 3)), "g": ("f32", (B, S, 6, 2))}, attributes={
        "mode": m, "padding_mode": "reflection", "align_corners": n})
      for m, n in (("nearest", 0), ("linear", 1), ("cubic", 0))),
]  # fmt: skip


def drawn(spec: Any, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Normal numbers; integers from 0."""
    kind, shape = spec
    sizes = [SIZES[size] if isinstance(size, str) else size for size in shape]
    if kind in ("f32", "normal"):
        return rng.standard_normal(sizes).astype(np.float32)
    return rng.integers(0, 4, sizes).astype(np.int8 if kind == "i8" else np.int64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_node(case: Case, rng: np.random.Generator, tmp_path: Path) -> None:
    initial = {
        name: drawn(value, rng) if isinstance(value, tuple) else np.asarray(value)
        for name, value in case.initial.items()
    }
    inputs = dict(case.inputs)
    if "ids" in case.order.split(" ") and "ids" not in inputs:
        inputs["ids"] = ("i64", (B, S))
    operands = case.order.split(" ") if case.order else [*inputs, *initial]
    outputs = [f"out{i}" for i in range(case.outputs)]
    node = helper.make_node(case.kind, operands, outputs, domain=case.domain, **case.attributes)
    path = saved(model([node], inputs, outputs, initial, case.opset), tmp_path)
    compared(path, {name: drawn(spec, rng) for name, spec in inputs.items()}, 2e-5)


FUNCTIONS: dict[str, Any] = {
    "Tan": np.tan, "Sinh": np.sinh, "Cosh": np.cosh, "Asin": np.arcsin, "Acos": np.arccos,
    "Atan": np.arctan, "Asinh": np.arcsinh, "Acosh": np.arccosh, "Atanh": np.arctanh,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_functions_of_a_number(kind: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """To the last digits, of small and large numbers too, and of those without a result."""
    ends = [0, 1, 1 + 1e-6, 1 - 1e-6, 1e-9, 1e5, 1e19, 3e38, 89.2, np.inf, np.nan]
    x = np.concatenate([rng.standard_normal(90), rng.random(90), ends]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = x[~(np.abs(x) > 1e5)] if kind == "Tan" else x
    with np.errstate(all="ignore"):
        wanted = FUNCTIONS[kind](x.astype(np.float64)).astype(np.float32)
    node = helper.make_node(kind, ["x"], ["out"])
    path = saved(model([node], {"x": ("f32", (B,))}, ["out"]), tmp_path)
    module = read(path)
    for got in (*evaluate(module, {"x": x}).values(), *on_emitted(module, {"x": x}, tmp_path)):
        np.testing.assert_allclose(got, wanted, 5e-7, 1e-30)


@pytest.mark.parametrize("kind", ["i8", "u8", "i32", "i64"])
def test_bits_of_integers(kind: str, rng: np.random.Generator, tmp_path: Path) -> None:
    held = np.dtype({"i8": "b", "u8": "B", "i32": "i", "i64": "q"}[kind])
    info = np.iinfo(held)
    x, y = rng.integers(info.min, info.max, (2, 40), held, endpoint=True)
    x[:3], y[:3] = [info.min, info.max, 0], [info.max, 1, info.min]
    bits = held.itemsize * 8
    by = rng.integers(0, bits, 40).astype(held)
    calls = {"And": np.bitwise_and, "Or": np.bitwise_or, "Xor": np.bitwise_xor}
    nodes = [helper.make_node(f"Bitwise{name}", ["x", "y"], [name]) for name in calls]
    nodes.append(helper.make_node("BitwiseNot", ["x"], ["Not"]))
    nodes += [helper.make_node("BitShift", ["x", "by"], [way], direction=way)
              for way in ("LEFT", "RIGHT")]  # fmt: skip
    wanted = [call(x, y) for call in calls.values()] + [~x, x << by, x >> by]
    if kind != "u8":  # by negative numbers, and by all bits
        by[:2], wanted[-2][:2], wanted[-1][:2] = (-1, bits), 0, x[:2] >> (bits - 1)
    given = {"x": x, "y": y, "by": by}
    inputs = dict.fromkeys(given, (kind, (B,)))
    outputs = [node.output[0] for node in nodes]
    path = saved(model(nodes, inputs, outputs, opset=OPSET if kind == "u8" else 28), tmp_path)
    module = compared(path, given, 0) if kind == "u8" else read(path)
    for results in (evaluate(module, given).values(), on_emitted(module, given, tmp_path)):
        for got, want in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("kind", "found"), [("Sub", "gather"), ("Add", "embedding")])
def test_ids_that_may_be_negative(
    kind: str, found: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """A lookup with ids that are computed by a minus counts them from the end."""
    nodes = [
        helper.make_node(kind, ["ids", "three"], ["moved"]),
        helper.make_node("Mod", ["moved", "rows"], ["wrapped"], fmod=1),
        helper.make_node("Gather", ["t", "wrapped" if kind == "Sub" else "moved"], ["out"]),
    ]
    table = rng.standard_normal((7, 12)).astype(np.float32)
    initial = {"three": i64(3), "rows": i64(7), "t": table}
    path = saved(model(nodes, IDS, ["out"], initial), tmp_path)
    module = compared(path, {"ids": rng.integers(0, 4, (3, 5))})
    assert found in [op.opname for op in module.main]


@pytest.mark.parametrize("size", [3, 8, 9])
def test_the_last_elements_of_a_symbolic_dimension(size: int, tmp_path: Path) -> None:
    """The file that irc writes counts from the end, so that fewer elements are all there are."""
    node = helper.make_node("Slice", ["x", "s", "e"], ["out"])
    initial = {"s": i64(-8), "e": i64((1 << 31) - 1)}
    path = saved(model([node], {"x": ("f32", (B,))}, ["out"], initial), tmp_path)
    x = {"x": np.arange(size, dtype=np.float32)}
    module = compared(path, x) if size >= 8 else read(path)
    np.testing.assert_array_equal(on_emitted(module, x, tmp_path)[0], x["x"][-8:])


def test_rows_whose_mask_is_the_lowest_number(rng: np.random.Generator, tmp_path: Path) -> None:
    """Their scores are equal; ONNX Runtime's Attention would give 0 for them."""
    found = {n: rng.standard_normal((1, 2, 4, 8)).astype(np.float32) for n in "qkv"}
    mask = np.zeros((1, 1, 4, 4), np.float32)
    mask[..., 1, :] = mask[..., 2, 1:] = np.finfo(np.float32).min
    node = helper.make_node("Attention", [*found, "m"], ["out"])
    inputs = {name: ("f32", array.shape) for name, array in {**found, "m": mask}.items()}
    made = model([node], inputs, ["out"], opset=24)
    path, given = saved(made, tmp_path), {**found, "m": mask}
    wanted = cast("list[Any]", ReferenceEvaluator(made).run(None, given))[0]
    module = read(path)
    for (out,) in (evaluate(module, given).values(), on_emitted(module, given, tmp_path)):
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["LayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"]
)
def test_an_epsilon_that_is_not_given(kind: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Of numbers so small that little else is left than epsilon, or nothing of it."""
    domain = "com.microsoft" if kind.startswith("Skip") else ""
    added = ["r"] if domain else []
    node = helper.make_node(kind, ["x", *added, "s"], ["out"], domain=domain)
    inputs = dict.fromkeys(("x", *added), ("f32", (B, S, 8)))
    initial = {"s": np.linspace(-2, 2, 8, dtype=np.float32)}
    path = saved(model([node], inputs, ["out"], initial), tmp_path)
    small = {n: (rng.uniform(1, 2, (3, 5, 8)) * 1e-4).astype(np.float32) for n in inputs}
    small["x"][..., ::2] *= -1
    compared(path, small, 1e-4)


def test_constants_in_nodes(rng: np.random.Generator, tmp_path: Path) -> None:
    table = rng.standard_normal((40, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["t"], value=numpy_helper.from_array(table)),
        helper.make_node("Constant", [], ["f"], value_float=0.5),
        helper.make_node("Constant", [], ["n"], value_ints=[0, -1]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
        helper.make_node("Mul", ["y", "f"], ["z"]),
        helper.make_node("Reshape", ["z", "n"], ["out"]),
    ]
    path = saved(model(nodes, {"x": ("f32", (B, 2, 40))}, ["out"]), tmp_path)
    module = compared(path, {"x": rng.standard_normal((4, 2, 40)).astype(np.float32)})
    assert "bytes(@model" in str(module)  # the table stays where it is


def test_log_sum_exp_does_not_overflow(tmp_path: Path) -> None:
    x = np.array([[1000, 1001], [-1000, -np.inf], [np.inf, 1], [-np.inf, -np.inf]], np.float32)
    node = helper.make_node("ReduceLogSumExp", ["x", "a"], ["out"], keepdims=0)
    made = model([node], {"x": ("f32", (B, 2))}, ["out"], {"a": i64(1)})
    compared(saved(made, tmp_path), {"x": x})


@pytest.mark.parametrize("kind", ["i64", "i32", "f32"])
def test_the_smallest_of_extremes(kind: str, tmp_path: Path) -> None:
    info = np.finfo(np.float32) if kind == "f32" else np.iinfo({"i64": "q", "i32": "i"}[kind])
    x = np.array([[0, info.max, info.min, 3, -1, info.min]], info.dtype)
    node = helper.make_node("TopK", ["x", "k"], ["v", "p"], largest=0)
    made = model([node], {"x": (kind, (B, 6))}, ["v", "p"], {"k": i64(4)})
    compared(saved(made, tmp_path), {"x": x}, 0.0)


def test_batches_are_normalised_in_f32(rng: np.random.Generator, tmp_path: Path) -> None:
    """Of f16 nothing is rounded on the way."""
    initial = {name: rng.random(5).astype(np.float32) + np.float32(0.5) for name in "sbv"}
    initial["m"] = rng.standard_normal(5).astype(np.float32)
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["out"])
    path = saved(model([node], {"x": ("f16", (B, 5, S))}, ["out"], initial, 15), tmp_path)
    x = rng.standard_normal((3, 5, 7)).astype(np.float16)
    s, b, m, v = (initial[name][:, None].astype(np.float64) for name in "sbmv")
    want = ((x - m) / np.sqrt(v + 1e-5) * s + b).astype(np.float16)
    (found,) = evaluate(read(path), {"x": x}).values()
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("columns", "rest", "is_joined"),
    [
        (["rows", "columns"], (3,), True),
        (["columns", "columns"], (), False),  # a diagonal
    ],
    ids=["slices", "diagonal"],
)
def test_indices_that_count(
    columns: list[str],
    rest: tuple[int, ...],
    is_joined: bool,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """Those in order need no arithmetic on indices; others are what they are."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["height"]),
        helper.make_node("Gather", ["sizes", "one"], ["width"]),
        helper.make_node("Range", ["zero", "height", "one"], ["all_rows"]),
        helper.make_node("Range", ["zero", "width", "one"], ["all_columns"]),
        helper.make_node("Unsqueeze", ["all_rows", "behind"], ["rows4"]),
        helper.make_node("Unsqueeze", ["all_columns", "before"], ["columns4"]),
        helper.make_node("Max", ["rows4", "columns4"], ["both"]),
        helper.make_node("Shape", ["both"], ["wide"]),
        helper.make_node("Expand", ["rows4", "wide"], ["rows"]),
        helper.make_node("Expand", ["columns4", "wide"], ["columns"]),
        *(
            helper.make_node("Unsqueeze", [name, "last"], [f"part{i}"])
            for i, name in enumerate(columns)
        ),
        helper.make_node("Concat", ["part0", "part1"], ["index"], axis=-1),
        helper.make_node("GatherND", ["x", "index"], ["out"]),
    ]
    numbers = {"zero": 0, "one": 1, "behind": [1, 2], "before": [0, 1], "last": [-1]}
    initial = {name: np.array(value, np.int64) for name, value in numbers.items()}
    shape = ("n", "n") if columns == ["columns", "columns"] else ("n", "m")
    made = model(nodes, {"x": ("f32", (*shape, *rest))}, ["out"], initial)
    sizes = (4, 4) if shape[0] == shape[1] else (3, 4)
    x = rng.standard_normal((*sizes, *rest)).astype(np.float32)
    module = compared(saved(made, tmp_path), {"x": x})
    assert ("lt" not in [op.opname for op in module.main]) == is_joined
