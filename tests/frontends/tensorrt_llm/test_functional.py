"""The functions of TensorRT-LLM, its norms and convolutions, against PyTorch on random inputs."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.dtypes import DataType
from irc.frontends.tensorrt_llm.functional import basic, convolution
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.frontends.onnx_models import on_emitted
from tests.frontends.tensorrt_llm.function_cases import CASES, Arg, Case, F, torch
from tests.frontends.tensorrt_llm.worlds import run, trace, used

pytestmark = pytest.mark.oracle
MODULES = (basic, convolution)
# refused below, or no functions of tensors
OTHERS = {"is_gated_activation", "non_gated_version", "per_dimension"}
Array = np.ndarray[Any, Any]
any_layers: Any = layers


def test_every_function_has_a_case() -> None:
    functions = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    tested = {name for case in CASES for name in re.findall(r"\b(?:F|x)\.(\w+)", case.text)}
    assert not functions - OTHERS - tested


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_function(case: Case, rng: np.random.Generator, tmp_path: Path) -> None:
    names = {size for arg in case.args for size in arg.shape if isinstance(size, str)}
    sizes = {name: int(rng.integers(3, 7)) for name in sorted(names)}
    arrays = {f"x{i}": _drawn(arg, sizes, rng) for i, arg in enumerate(case.args)}

    def build(mapping: Any) -> None:
        inputs = [_input(f"x{i}", arg) for i, arg in enumerate(case.args)]
        for i, found in enumerate(_listed(case.call(*inputs))):
            assert isinstance(found, Tensor)
            found.mark_output(f"y{i}")

    wanted = [x.numpy() for x in _listed(case.meaning(*map(torch.from_numpy, arrays.values())))]
    with new_session(case.version):
        module = trace(build)
        arrays = used(module, arrays)
        found = list(irc.evaluate(module, arrays).values())
        _compare(found, wanted, 1e-4)
        dtypes = [each.dtype for each in wanted if each.dtype.kind == "f"]
        assert [each.dtype for each in found if each.dtype.kind == "f"] == dtypes
        _compare(on_emitted(module, arrays, tmp_path), wanted, 1e-3)


def _compare(found: Sequence[Array], wanted: Sequence[Array], close: float) -> None:
    assert [each.shape for each in found] == [each.shape for each in wanted]
    for got, expected in zip(found, wanted, strict=True):
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(got, expected, rtol=close, atol=close)
        else:
            assert (got == expected).all()


def _drawn(arg: Arg, sizes: dict[str, int], rng: np.random.Generator) -> Array:
    shape = [sizes[size] if isinstance(size, str) else size for size in arg.shape]
    if arg.dtype == "bool":
        return rng.random(shape) < 0.5
    if arg.dtype.startswith("int"):
        return rng.integers(int(arg.low), int(arg.high), shape, arg.dtype)
    count = int(np.prod(shape))
    places = (rng.permutation(count) + rng.uniform(0.1, 0.9, count)) / count
    return (arg.low + (arg.high - arg.low) * places.reshape(shape)).astype(arg.dtype)


def _input(name: str, arg: Arg) -> Tensor:
    ranges = OrderedDict(
        (
            size if isinstance(size, str) else f"{name}_{i}",
            [(1, 4, 8) if isinstance(size, str) else size],
        )
        for i, size in enumerate(arg.shape)
    )
    shape = [-1 if isinstance(size, str) else size for size in arg.shape]
    return Tensor(name, arg.dtype, shape, ranges)


def _listed(found: Any) -> Sequence[Any]:
    return found if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize(("version", "dtype"), [("0.7", "INT32"), ("0.16", "INT64")])
def test_the_dtype_of_sizes(version: str, dtype: str) -> None:
    with new_session(version), net_guard(Network()):
        assert F.shape(Tensor("x", "float32", [5, 7])).dtype is DataType[dtype]


def test_a_start_from_the_data_chooses_in_its_dimension_only() -> None:
    network = Network()
    with net_guard(network):
        x, at = Tensor("x", "float32", [5, 7]), Tensor("at", "int32", [1])
        F.slice(x, F.concat([0, at]), [5, 2])
    assert [op.opname for op in network.function].count("gather") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: F.categorical_sample(x), "expected rand_data"),
        (lambda x, y: F.view(x, x), "a shape cannot depend on the elements"),
        (lambda x, y: F.arange(0, F.max(x, (0, 1)), "int32"), "cannot depend on the elements"),
        (lambda x, y: x + 0.5, "cast"),
        (lambda x, y: F.split(x, 5, 1), "12 elements are not a multiple of 5"),
        (lambda x, y: F.chunk(x, 5, 1), "12 elements do not make 5 equal pieces"),
        (lambda x, y: F.split(x, 2, 0), "B elements are not a multiple of 2"),
        (lambda x, y: F.transpose(x, 0, 2), "expected a dimension from -2 to 1, found 2"),
        (lambda x, y: F.softmax(y, 4), "4 of 4 dimensions|no dimension 4"),
        (lambda x, y: F.flatten(x, 2), "expected a dimension from -2 to 1, found 2"),
        (lambda x, y: F.slice(x, [0], [1]), "expected 2 starts, sizes and strides"),
        (lambda x, y: F.slice(F.shape(x), [1], [2]), "element 2 lies beyond the 2"),
        (
            lambda x, y: F.slice(x, [0, 0], [1, 1], mode="FILL"),
            "mode is not supported: all elements",
        ),
        (lambda x, y: F.pad(x, (1,)), "expected two numbers for each padded dimension"),
        (lambda x, y: F.pad(x, (1, 1), "reflect"), "expected the mode 'constant', found 'reflect'"),
        (lambda x, y: F.reduce(x, "NORM", 0), "expected the reduction SUM, PROD, MAX, MIN, AVG"),
        (lambda x, y: F.interpolate(x, 3, mode="bilinear"), "expected one of .*, found 'bilinear'"),
        (lambda x, y: F.gelu(None), "Gelu lacks its input 0"),
        (lambda x, y: F.layer_norm(x, 6), r"to end in the sizes \[6\]"),
        (lambda x, y: F.rms_norm(x, 12, 5), "5 groups do not divide 12 features"),
        (lambda x, y: F.gather_last_token_logits(x, x, False), r"expected padded states \[batch"),
        (lambda x, y: F.index_select(x, 0, x), r"expected a vector of indices, found i32\[B, 12\]"),
        (lambda x, y: F.gather(F.shape(x), 0, 2), "indices below 2, found 2"),
        (lambda x, y: F.select(F.shape(x), 0, -3), "indices below 2, found -3"),
        (lambda x, y: F.expand_dims(x, [1, -3]), r"names one of the axes \[1, -3\] twice"),
        (lambda x, y: F.repeat(x, [2]), "expected 2 numbers or more"),
        (lambda x, y: F.add(x, None), "expected a tensor or a number, found None"),
        (lambda x, y: F.conv2d(y, y, stride=(2,)), r"2 numbers of at least 1, .*found \(2,\)"),
        (lambda x, y: F.conv_transpose2d(y, y, None, (1, 1, 1)), "2 numbers of at least 1"),
        (lambda x, y: F.avg_pool2d(y, (3, 0)), r"at least 1, or one for all, found \(3, 0\)"),
        (lambda x, y: F.interpolate(y, (0, 2)), r"at least 1, or one for all, found \(0, 2\)"),
        (lambda x, y: F.interpolate(y, scale_factor=0.1), r"one for all, found \[0, 0\]"),
        (lambda x, y: F.interpolate(y, scale_factor=(2.0, 2.0, 2.0)), "expected 2 numbers"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with net_guard(Network()), pytest.raises(Error) as caught:
        x = Tensor("x", "int32", [-1, 12], OrderedDict(B=[(1, 4, 8)], n=[12]))
        call(x, Tensor("y", "float32", [4, 4, 5, 5]))
    assert re.search(message, caught.value.message)
    assert "test_functional.py" in str(caught.value)


def test_long_running_sums_of_floats_stay_exact(rng: np.random.Generator) -> None:
    x = rng.random((2, 50_001, 2)).astype(np.float32)

    def build(mapping: Any) -> None:
        F.cumsum(Tensor("x", "float32", x.shape), 1).mark_output("y")

    with new_session():
        sums = irc.evaluate(trace(build), {"x": x})["y"]
    np.testing.assert_allclose(sums, np.cumsum(x, 1, np.float64), rtol=1e-5, atol=1e-5)


def test_enumerations_of_tensorrt() -> None:
    with aliases(), new_session(), net_guard(Network()) as network:
        trt: Any = import_module("tensorrt")
        x = Tensor("x", trt.float32, [2, 3], location=trt.TensorLocation.HOST)
        F.reduce(F.tanh(x), trt.ReduceOperation.MAX, 1)
        assert [op.opname for op in network.function] == ["tanh", "reduce_max"]
        assert x.location == 1 and trt.BuilderFlag.TF32 == 6 and trt.MemoryPoolType.WORKSPACE == 0


# -- norms and convolutions as layers of both generations


class Int(torch.nn.Module):
    """What Cast("int32") is."""

    def forward(self, x: Any) -> Any:
        return x.int()


# a layer, the same in PyTorch if it has another text, and the shape of x
ROWS = """
LayerNorm(6, 1e-3) | | 2 6
LayerNorm((3, 4), bias=False) | | 2 3 4
LayerNorm(6, elementwise_affine=False) | | 2 6
RmsNorm(normalized_shape=6, eps=1e-2) | RMSNorm(6, 1e-2) | 2 3 6
RmsNorm(6, elementwise_affine=False) | RMSNorm(6, 1e-6, elementwise_affine=False) | 2 6
GroupNorm(2, 4) | | 2 4 7 9
Conv1d(4, 6, 3, 2, 1, groups=2) | | 2 4 9
Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), bias=False) | | 2 4 7 9
AvgPool2d(3, 2, 0, False, False) | AvgPool2d(3, 2) | 2 4 7 9
Mish() | | 2 4 7 9
Cast("int32") | Int() | 2 4 7 9
ConvTranspose2d(4, 6, (3, 2), (2, 3), 1, (1, 2), groups=2) \
| ConvTranspose2d(4, 6, (3, 2), (2, 3), 1, groups=2) | 2 4 7 9
"""  # TensorRT-LLM ignores the other arguments of AvgPool2d and ConvTranspose2d


@pytest.mark.parametrize("row", ROWS.strip().split("\n"))
@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_a_layer(row: str, version: str, rng: np.random.Generator) -> None:
    call, meaning, sizes = (part.strip() for part in row.split("|"))
    shape = tuple(map(int, sizes.split()))
    expected = eval(meaning or call, vars(torch.nn) | {"Int": Int})
    for value in expected.parameters():
        value.data = torch.from_numpy(rng.standard_normal(value.shape).astype(np.float32))
    x = rng.standard_normal(shape).astype(np.float32)

    def build(mapping: Any) -> None:
        layer = eval(call, vars(layers).copy())
        named = dict(expected.named_parameters())
        assert [name for name, _ in layer.named_parameters()] == list(named)
        for key, value in named.items():
            own: Any = getattr(layer, key)
            own.value = value.data.reshape(own.shape)
        layer(Tensor("x", "float32", shape)).mark_output("y")

    y = run(build, {"x": x}, version=version)["y"]
    wanted = expected(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: any_layers.GroupNorm(3, 4), "expected groups that divide the 4 channels, found 3"),
        (lambda: any_layers.LayerNorm(4, tp_size=2, tp_dim=0), "tp_size is not supported"),
        (lambda: any_layers.Conv2d(4, 6, 3, groups=4), "divide 4 and 6 channels, found 4"),
        (lambda: any_layers.Conv2d(4, 6, 3, padding_mode="same"), "'zeros', found 'same'"),
    ],
)
def test_arguments_that_no_layer_has(make: Any, message: str) -> None:
    with pytest.raises(Error) as caught:
        make()
    assert message in caught.value.message
