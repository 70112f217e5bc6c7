"""QuantizeLinear and DequantizeLinear of other tools' files, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import irc
from irc.backends.reference import evaluate
from irc.frontends.onnx import import_onnx
from irc.weights import BytesRef
from tests.fresh import fresh
from tests.frontends.onnx_models import model, saved

KINDS = {
    "i8": (np.int8, -128, 128),
    "u8": (np.uint8, 0, 256),
    "i4": (ml_dtypes.int4, -8, 8),
    "u4": (ml_dtypes.uint4, 0, 16),
}


def drawn(kind: str, shape: tuple[int, ...], least: int = -128) -> np.ndarray[Any, Any]:
    dtype, low, high = KINDS[kind]
    return fresh(sum(shape)).integers(max(low, least), high, shape).astype(dtype)


def product(
    kind: str, shape: tuple[int, ...], scales: tuple[int, ...], zero: Any, **words: Any
) -> Any:
    """x · (W dequantized), with W, scales and zero points in the file."""
    scale = fresh(3).uniform(0.1, 2, scales).astype(np.float32)
    given = {"w": drawn(kind, shape), "s": scale}
    if zero is not None:
        given["z"] = np.zeros(scales, KINDS[kind][0]) if zero == 0 else drawn(kind, scales, 1)
    nodes = [
        helper.make_node("DequantizeLinear", [*given], ["d"], **words),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    return model(nodes, {"x": ("f32", ("B", shape[0]))}, ["y"], given)


def as_written(path: Path) -> onnxruntime.InferenceSession:
    """Without the optimizations of ONNX Runtime, which may quantize x as well."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options)


CASES = [
    ("i8", (12, 10), (), 0, {}),
    ("u8", (12, 10), (), 7, {}),
    ("u8", (12, 10), (12,), 7, {"axis": 0}),
    ("i8", (12, 10), (12,), 7, {"axis": -2}),
    ("i8", (12, 10), (4, 10), 7, {"axis": 0, "block_size": 3}),
    ("i4", (64, 10), (2, 10), 0, {"axis": 0, "block_size": 32}),
    ("u4", (64, 10), (2, 10), 7, {"axis": 0, "block_size": 32}),
]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(("kind", "shape", "scales", "zero", "words"), CASES)
def test_a_product_with_quantized_weights(
    kind: str,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    zero: Any,
    words: dict[str, Any],
    inside: bool,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        product(kind, shape, scales, zero, **words),
        path,
        save_as_external_data=not inside,
        size_threshold=0,
        location="weights.bin",
    )
    module = import_onnx(path)
    (dequantize,) = [op for op in module.ops() if op.opname == "dequantize"]
    assert ("zero" in dequantize.present) == (zero == 7)
    stored = dequantize.operands[0]
    assert stored.type.dtype == kind
    if not inside:
        assert isinstance(stored, irc.Weight) and isinstance(stored.ref, BytesRef)
    x = fresh(9).standard_normal((3, shape[0])).astype(np.float32)
    wanted: Any = as_written(path).run(None, {"x": x})[0]
    found = evaluate(module, {"x": x}, base=tmp_path)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-3)


def test_a_wider_result_is_rounded_once(tmp_path: Path) -> None:
    x = np.arange(-8, 8, dtype=np.int8)
    node = helper.make_node("DequantizeLinear", ["x", "s"], ["y"], output_dtype=TensorProto.FLOAT)
    path = saved(model([node], {"x": ("i8", (16,)), "s": ("f16", ())}, ["y"]), tmp_path)
    scale = fresh(2).uniform(0.5, 2, ()).astype(np.float16)
    found = evaluate(import_onnx(path), {"x": x, "s": scale})["y"]
    np.testing.assert_array_equal(found, x * scale.astype(np.float32))


def with_other_zeros() -> Any:
    made = product("i8", (12, 10), (10,), 7)
    made.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.ones(3, np.int8), "z"))
    return made


class Inputs(quantization.CalibrationDataReader):
    """Five inputs [2, 3, 6, 6] of a model."""

    def __init__(self) -> None:
        self.left = [fresh(n).standard_normal((2, 3, 6, 6)).astype(np.float32) for n in range(5)]

    def get_next(self) -> Any:
        return {"x": self.left.pop()} if self.left else None


def network() -> Any:
    """Conv, Relu, mean, Gemm with a bias, MatMul and Add."""
    nodes = [
        helper.make_node("Conv", ["x", "cw", "cb"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "gw", "gb"], ["g"], transB=1),
        helper.make_node("MatMul", ["g", "mw"], ["p"]),
        helper.make_node("Add", ["p", "g"], ["y"]),
    ]
    shapes = {"cw": (8, 3, 3, 3), "cb": (8,), "gw": (5, 8), "gb": (5,), "mw": (5, 5)}
    given = {n: fresh(7).standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    network = model(nodes, {"x": ("f32", (2, 3, 6, 6))}, ["y"], given, opset=20)
    network.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return network


KIND = quantization.QuantType
FORM = quantization.QuantFormat
WRITTEN: dict[str, dict[str, Any]] = {
    "default QDQ": {},
    "i8 QDQ": {"activation_type": KIND.QInt8, "per_channel": True},
    "symmetric": {"activation_type": KIND.QInt8, "extra_options": {"ActivationSymmetric": True}},
    "i16 QDQ": {"activation_type": KIND.QInt16, "weight_type": KIND.QInt16},
    "QOperator": {"quant_format": FORM.QOperator},
    "QOperator per channel": {"quant_format": FORM.QOperator, "per_channel": True},
    "dynamic": {},
    "dynamic u8": {"weight_type": KIND.QUInt8},
}


@pytest.mark.parametrize("written", WRITTEN)
def test_files_of_the_quantization_of_onnx_runtime(written: str, tmp_path: Path) -> None:
    source, path = saved(network(), tmp_path, "float.onnx"), tmp_path / "model.onnx"
    if written.startswith("dynamic"):
        quantization.quantize_dynamic(source, path, **WRITTEN[written])
    else:
        quantization.quantize_static(source, path, Inputs(), **WRITTEN[written])
    x = fresh(9).standard_normal((2, 3, 6, 6)).astype(np.float32)
    wanted: Any = as_written(path).run(None, {"x": x})[0]
    step = (wanted.max() - wanted.min()) / 100  # of the codes, where a tie may be rounded otherwise
    y = evaluate(import_onnx(path), {"x": x}, base=tmp_path)["y"]
    np.testing.assert_allclose(y, wanted, rtol=0, atol=step)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=0, atol=step)


@pytest.mark.parametrize("zeros", [(), (10,)])
def test_a_product_of_integers_is_exact(zeros: tuple[int, ...], tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMulInteger", ["x", "w", "a", "z"], ["y"])]
    given = {"w": drawn("i8", (900, 10)), "a": drawn("u8", ()), "z": drawn("i8", zeros)}
    path = saved(model(nodes, {"x": ("u8", (3, 900))}, ["y"], given), tmp_path)
    x = drawn("u8", (3, 900))
    wanted = (x.astype(int) - given["a"]) @ (given["w"].astype(int) - given["z"])
    np.testing.assert_array_equal(evaluate(import_onnx(path), {"x": x}, base=tmp_path)["y"], wanted)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], wanted)


def with_words(kind: str, *inputs: str, **words: Any) -> Any:
    made = product("i8", (12, 10), (), None)
    made.graph.node.append(helper.make_node(kind, ["y", *inputs], ["q"], **words))
    made.graph.output[0].name = "q"
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_other_zeros, "zero points"),
        (lambda: with_words("MatMulNBits", "x"), "no operation for it; quantize in the form"),
        (
            lambda: with_words("QuantizeLinear", "s", output_dtype=TensorProto.FLOAT8E8M0),
            "makes f8e8m0; there is i4, u4",
        ),
        (lambda: with_words("QuantizeLinear", "s", saturate=0), "saturate=0 is not supported"),
        (
            lambda: product("i8", (10, 4), (4, 4), None, axis=0, block_size=3),
            "blocks must divide the axis",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match=message):
        import_onnx(saved(make(), tmp_path))


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_casts_to_powers_of_two_round_as_the_file_says(tmp_path: Path, mode: str) -> None:
    powers = np.array([2.0**n for n in (-120, -3, -1, 0, 1, 7, 126)], np.float32)
    around = [
        np.nextafter(each, side, dtype=np.float32)
        for each in (powers, 1.5 * powers)
        for side in (np.float32(0), np.float32(np.inf))
    ]
    x = np.concatenate([powers, *around, 10 ** fresh(6).uniform(-30, 30, 50)]).astype(np.float32)
    attributes = {"round_mode": mode, "saturate": 1, "to": TensorProto.FLOAT8E8M0}
    nodes = [
        helper.make_node("Cast", ["x"], ["e"], **attributes),
        helper.make_node("Cast", ["e"], ["y"], to=TensorProto.FLOAT),
    ]
    made = model(nodes, {"x": ("f32", x.shape)}, ["y"], {})
    (found,) = evaluate(import_onnx(saved(made, tmp_path)), {"x": x}).values()
    wanted = numpy_helper.to_float8e8m0(x, saturate=True, round_mode=mode).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
