"""ONNX files through irc have no more kernels than the same files built as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import irc
from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.builder.request import BuildRequest, Profile
from irc.backends.tensorrt.target import Target
from tests.fresh import fresh
from tests.frontends.onnx_models import kind_of, model, saved
from tests.tensorrt.emission import reports

pytestmark = pytest.mark.needs_rtx
RANGES = {"batch": (1, 2, 8), "seq": (1, 16, 128)}
WIDTH, HEADS = 128, 4
SHAPES = {"x": ("batch", "seq", WIDTH), "mask": ("batch", "seq")}


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def masked() -> list[onnx.NodeProto]:
    """The mask of transformers 5 as torch exports it: mask[b, k] by indices of all rows."""
    return [
        node("Cast", "mask", "bools", to=onnx.TensorProto.BOOL),
        node("Shape", "x", "rows1", start=0, end=1),
        node("Shape", "x", "keys1", start=1, end=2),
        node("Squeeze", "rows1", "rows"),
        node("Squeeze", "keys1", "keys"),
        node("Range", "zero rows one", "row"),
        node("Range", "zero keys one", "key"),
        node("Unsqueeze", "row behind", "row4"),
        node("Unsqueeze", "key before", "key4"),
        node("Max", "row4 key4", "both"),
        node("Shape", "both", "wide"),
        node("Expand", "row4 wide", "row_wide"),
        node("Expand", "key4 wide", "key_wide"),
        node("Unsqueeze", "row_wide last", "row5"),
        node("Unsqueeze", "key_wide last", "key5"),
        node("Concat", "row5 key5", "index", axis=-1),
        node("GatherND", "bools index", "seen"),
        node("Unsqueeze", "key query", "query4"),
        node("GreaterOrEqual", "query4 zero", "always"),
        node("And", "always seen", "visible"),
    ]


def heads() -> list[onnx.NodeProto]:
    """Queries, keys and values by heads."""
    nodes: list[onnx.NodeProto] = []
    for i, name in enumerate("qkv"):
        nodes += [
            node("MatMul", f"x w{name}", f"{name}0"),
            node("Add", f"{name}0 bias", f"{name}1"),
            node("Reshape", f"{name}1 split", f"{name}2"),
            node("Transpose", f"{name}2", name, perm=[0, 2, 3, 1] if i == 1 else [0, 2, 1, 3]),
        ]
    return nodes


def decomposed() -> list[onnx.NodeProto]:
    """Attention by products and a softmax, whose NaN become 0."""
    return [
        node("Where", "visible none low", "added"),
        node("Mul", "q root", "q_scaled"),
        node("Mul", "k root", "k_scaled"),
        node("MatMul", "q_scaled k_scaled", "products"),
        node("Add", "products added", "scores"),
        node("Softmax", "scores", "softmax", axis=-1),
        node("IsNaN", "softmax", "nan"),
        node("Where", "nan none softmax", "weights"),
        node("MatMul", "weights v", "attended"),
    ]


def whole() -> list[onnx.NodeProto]:
    """Attention as one node."""
    return [
        node("Transpose", "k", "k_rows", perm=[0, 1, 3, 2]),
        node("Attention", "q k_rows v visible", "attended"),
    ]


def written(
    folder: Path, attention: Sequence[onnx.NodeProto], dtype: Any, rng: np.random.Generator
) -> Path:
    """The file of one attention block in a dtype of numpy."""
    initial: dict[str, Any] = {f"w{name}": rng.normal(size=(WIDTH, WIDTH)) for name in "qkvo"}
    initial |= {"bias": rng.normal(size=WIDTH), "none": 0, "low": -np.inf, "root": 0.42}
    initial = {name: np.asarray(value, dtype) for name, value in initial.items()}
    initial |= {"zero": np.int64(0), "one": np.int64(1)}
    numbers = {"behind": [1, 2, 3], "before": [0, 1, 2], "query": [0, 1, 3], "last": [-1]}
    numbers |= {"split": [0, 0, HEADS, WIDTH // HEADS], "joined": [0, 0, WIDTH]}
    initial |= {name: np.array(value, np.int64) for name, value in numbers.items()}
    nodes = [*masked(), *heads(), *attention]
    nodes += [
        node("Transpose", "attended", "rows_first", perm=[0, 2, 1, 3]),
        node("Reshape", "rows_first joined", "flat"),
        node("MatMul", "flat wo", "projected"),
        node("Add", "projected x", "out"),
    ]
    arrays = {name: np.asarray(value) for name, value in initial.items()}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {"x": (kind_of(arrays["wq"]), SHAPES["x"]), "mask": ("i64", SHAPES["mask"])}
    made = model(nodes, inputs, ["out"], arrays)
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("out", kind, SHAPES["x"]))
    return saved(made, folder)


def built_as_it_is(path: Path) -> Report:
    sizes = {
        name: tuple(
            tuple(RANGES[n][i] if isinstance(n, str) else n for n in shape) for i in range(3)
        )
        for name, shape in SHAPES.items()
    }
    target = Target.parse("tensorrt-rtx")
    request = BuildRequest(path, path.with_suffix(".engine"), target, (Profile("all", sizes),))
    return build(request).report


def built_through_irc(path: Path, **options: Any) -> Report:
    out = path.parent / "out"
    artifact = irc.compile(path, out, backend="tensorrt-rtx", dims=RANGES, **options)
    (report,) = reports(artifact)
    return report


@pytest.mark.parametrize("attention", [decomposed, whole], ids=lambda each: each.__name__)
def test_no_more_kernels(attention: Any, tmp_path: Path) -> None:
    path = written(tmp_path, attention(), np.float16, fresh())
    plain, found = built_as_it_is(path), built_through_irc(path)
    for report in (plain, found):
        assert any("_mha_" in layer.name for layer in report.layers)
    assert len(found.layers) <= len(plain.layers), [layer.name for layer in found.layers]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_file_in_f32_gets_fused_attention(dtype: str, tmp_path: Path) -> None:
    report = built_through_irc(written(tmp_path, decomposed(), np.float32, fresh()), dtype=dtype)
    assert any("_mha_" in layer.name for layer in report.layers)
