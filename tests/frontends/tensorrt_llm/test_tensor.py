"""Tensors of TensorRT-LLM: inputs with ranges, operators, known sizes, graph edits."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm import DataType, Network, Parameter, Tensor, functional, net_guard
from irc.frontends.tensorrt_llm.arithmetic import binary, unwrapped
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.dtypes import as_array, data_type, irc_dtype, str_dtype
from irc.frontends.tensorrt_llm.module import constant_tensor
from irc.frontends.tensorrt_llm.network import OptimizationProfile, default_trtnet
from irc.frontends.tensorrt_llm.tensor import content_of, shape_of, tensor_of_sizes, type_of, wrap
from irc.ir.dims import DimLike, symbol
from tests.fresh import fresh

from .worlds import run, trace

RANGES = OrderedDict(batch=[[1, 2, 6]], length=[[1, 3, 9]])


def source(name: str = "x", dtype: Any = "int32") -> Tensor:
    return Tensor(name, dtype, [-1, -1], RANGES)


DTYPES: dict[str, tuple[Any, ...]] = {
    "f16": (DataType.HALF, "float16", "half"), "bf16": ("bf16",), "f8e4m3": ("fp8",),
    "f4e2m1": (DataType.FP4,), "bool": ("bool",), "i8": ("qint8",), "i64": (np.int64,),
    "f32": (np.dtype("float32"),),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_have_one_name_in_irc(name: str) -> None:
    for dtype in DTYPES[name]:
        assert irc_dtype(dtype) == name
        assert irc_dtype(data_type(dtype)) == name == irc_dtype(str_dtype(dtype))


def test_dtypes_refuse_what_is_none() -> None:
    with pytest.raises(irc.Error, match="expected a dtype such as 'float16', found 'flot16'; did"):
        irc_dtype("flot16")
    with pytest.raises(irc.Error, match="TensorRT has no type for f64"):
        data_type("float64")
    for no_dtype in (object(), None):
        with pytest.raises(irc.Error, match="expected a dtype"):
            irc_dtype(no_dtype)


@pytest.mark.oracle
def test_tensors_of_pytorch_are_arrays() -> None:
    import torch

    narrow = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in (torch.float32, torch.int64, *narrow):
        tensor = torch.tensor([1.0, -2.5, 3.0]).to(dtype)
        array = as_array(tensor)
        assert irc_dtype(array.dtype) == irc_dtype(dtype)
        assert array.astype(np.float32).tolist() == tensor.float().tolist()


def test_dynamic_sizes_are_symbols_with_the_ranges_of_all_profiles() -> None:
    network = Network()
    with net_guard(network):
        two = OrderedDict([("batch", [[1, 4, 8], [2, 3, 4]]), ("hidden", [16, 16])])
        x = Tensor("x", DataType.HALF, [-1, 16], two)
    assert str(x.type) == "f16[batch, 16]" and network.dims == {"batch": (1, 4, 8)}
    assert x.shape == (-1, 16) and x.size(1) == 16 and x.rank() == x.ndim() == 2
    assert x.dtype is DataType.HALF and network.is_input(x)


WRONG_RANGES = [
    ([-1, 4], OrderedDict(b=[[1, 2, 3]])), ([-1], OrderedDict(b=[[3, 2, 1]])),
    ([4], OrderedDict(h=[5])), ([-1, -1], OrderedDict(b=[1], s=[1, 2])), ([-1], [(1, 2, 3)]),
    ([-1], OrderedDict(b=[])),
]  # fmt: skip


@pytest.mark.parametrize("shape, ranges", WRONG_RANGES)
def test_ranges_that_do_not_fit_name_the_input(shape: Any, ranges: Any) -> None:
    with net_guard(Network()), pytest.raises(irc.Error) as error:
        Tensor("ids", "int32", shape, ranges)
    message = str(error.value)
    assert f"the input ids of shape {shape}: expected a dim_range such as" in message
    assert "test_tensor.py" in message and f"found {ranges}" in error.value.message


def test_shapes_may_have_the_sizes_of_other_inputs() -> None:
    with net_guard(Network()):
        batch, length = source().type.shape
        assert str(Tensor("y", "int32", [length * 2, batch, 3]).type) == "i32[2*length, batch, 3]"


def test_one_dimension_has_one_range() -> None:
    with net_guard(Network()), pytest.raises(irc.Error) as error:
        source("x")
        Tensor("mask", "int32", [-1, 7], OrderedDict(batch=[[1, 2, 5]], h=[7]))
    assert "the dimension 'batch' has different ranges" in str(error.value)
    assert "x: shape [-1, -1], batch in (1, 2, 6)" in str(error.value)
    assert "mask: shape [-1, 7], batch in (1, 2, 5)" in str(error.value)


def test_inputs_need_a_network_and_a_name_of_their_own() -> None:
    with pytest.raises(irc.Error, match="expected a network in progress; write this inside"):
        source()
    with net_guard(Network()):
        source()
        with pytest.raises(irc.Error, match="two inputs called 'x'"):
            source()
        with pytest.raises(irc.Error, match="an input needs a name, a dtype and a shape"):
            Tensor("y", "int32")
        with pytest.raises(irc.Error, match="expected an input name such as"):
            Tensor("a.b", "int32", [1])


def test_tensors_compare_elements_and_none_by_identity() -> None:
    with net_guard(Network()):
        x, y = source("x"), source("y")
        assert (x == None) is False and (x != None) is True  # noqa: E711
        assert x in {x: 1} and bool(x)
        with pytest.raises(irc.Error, match="a comparison of tensors has no truth value"):
            bool(x == y)
        with pytest.raises(irc.Error, match="a tensor has no value while a network is built"):
            int(x)
        with pytest.raises(irc.Error, match="has no value"):
            list(x)


B, S = symbol("batch"), symbol("length")


@pytest.mark.parametrize(
    "compute, wanted",
    [
        (lambda b, s: b + s * 2 - 1, (B + S * 2 - 1,)),
        (lambda b, s: (b * 6) // 3, (B * 2,)),
        (lambda b, s: (s * 8) / 4, (S * 2,)),
        (lambda b, s: tensor_of_sizes([b.content[0], 4]) * 2, (B * 2, 8)),
        (lambda b, s: tensor_of_sizes([7, 9]) // tensor_of_sizes([2, 3]), (3, 3)),
        (lambda b, s: 1 - b, (1 - B,)),
        (lambda b, s: binary("Max", tensor_of_sizes(3), tensor_of_sizes(5)), (5,)),
    ],
)
def test_sizes_are_computed_without_operations(compute: Any, wanted: tuple[DimLike, ...]) -> None:
    network = Network()
    with net_guard(network):
        x = source()
        b, s = (tensor_of_sizes(size) for size in x.type.shape)
        assert compute(b, s).content == wanted
        assert not network.get_layers()


def test_known_sizes_become_data_where_they_are_used() -> None:
    def build(_: Any) -> None:
        x = source(dtype="int64")
        b, s = (tensor_of_sizes(size, "i64") for size in x.type.shape)
        (x + b * s * 3).mark_output("y")
        tensor_of_sizes([B * 2 - 4, 5, S - 1], "i64").mark_output("sizes")
        (b // 2).mark_output("half")  # is no polynomial
        (tensor_of_sizes([2, 3, 4], "i64") * 2).mark_output("numbers")

    x = fresh().integers(0, 9, (4, 7))
    got = run(build, {"x": x})
    assert np.array_equal(got["y"], x + 4 * 7 * 3) and got["half"] == 2
    assert got["sizes"].tolist() == [4, 5, 6] and got["numbers"].tolist() == [4, 6, 8]


def test_shapes_are_made_of_numbers_and_known_sizes() -> None:
    with net_guard(Network()):
        x = source()
        b = tensor_of_sizes(x.type.shape[0])
        wanted: tuple[DimLike, ...] = (B, -1, 8)
        assert shape_of([b, -1, 8]) == wanted == shape_of(tensor_of_sizes([B, -1, 8]))
        assert shape_of((tensor_of_sizes([B, 2]), np.int64(3))) == (B, 2, 3)
        assert content_of(x) is None and content_of(True) is None
        with pytest.raises(irc.Error, match="a shape cannot depend on the elements of a tensor"):
            shape_of([b, x])


def test_constants_of_every_size() -> None:
    random = fresh()
    arrays = {
        "scalar": np.float32(random.normal()),
        "same": np.full((3, 5), 2.5, np.float16),
        "few": random.normal(size=(2, 7)).astype(np.float32),
        "many": random.normal(size=(5, 4)).astype(np.float32),
        "whole": np.arange(6, dtype=np.int32),
        "positions": np.arange(40, dtype=np.int64),
        "mask": random.random((3, 9)) < 0.5,
    }

    def build(_: Any) -> None:
        for name, array in arrays.items():
            constant_tensor(array).mark_output(name)

    for name, got in run(build, {}).items():
        assert got.dtype == arrays[name].dtype and np.array_equal(got, arrays[name]), name


def test_outputs_are_cast_and_named_once() -> None:
    def build(_: Any) -> None:
        x = source()
        (x + 1).mark_output("y", "float16")
        with pytest.raises(irc.Error, match="two outputs called 'y'"):
            x.mark_output("y")
        z = x * 2
        z.name = "layers.0/z"
        z.mark_output()

    got = run(build, {"x": np.ones((2, 2), np.int32)})
    assert got["y"].dtype == np.float16 and got["layers_0_z"].tolist() == [[2, 2], [2, 2]]


def test_names_and_dtypes_may_follow_the_mark() -> None:
    def build(_: Any) -> None:
        x = Tensor("given", "int32", [2, 2]).trt_tensor
        x.name, x.dtype = "x", DataType.HALF
        y = (x * 2.0).trt_tensor
        default_trtnet().mark_output(y)
        y.name, y.dtype = "y", DataType.FLOAT
        for same in (functional.identity(x), functional.view(x, (2, 2))):  # not the input itself
            same.name = f"same{default_trtnet().num_outputs}"
            default_trtnet().mark_output(same)
        network = default_trtnet()
        assert [network.get_output(i).name for i in range(3)] == ["y", "same1", "same2"]
        assert network.num_inputs == 1 and network.get_input(0) is x
        layer = network.get_layer(1)
        assert (layer.type, layer.num_inputs, layer.get_input(0).name) == ("mul", 2, "x")
        assert layer.get_output(0).shape == (2, 2)
        with pytest.raises(irc.Error, match=r"the input x is f16\[2, 2\] and in use"):
            x.dtype = "float32"

    x = np.array([[1, 2], [3, 4]], np.float16)
    got = run(build, {"x": x})
    assert list(got) == ["y", "same1", "same2"]
    assert got["y"].dtype == np.float32 and got["same1"].dtype == np.float16
    assert np.array_equal(got["y"], x * 2) and np.array_equal(got["same2"], x)


def test_ranges_may_come_from_profiles_and_sizes_from_each_other() -> None:
    random = fresh()

    def build(_: Any) -> None:
        x, y, v = (Tensor(name, "float32", [-1, -1]) for name in "xyv")
        wrap(unwrapped(x) + unwrapped(v)).mark_output("sum")  # of irc's own tensors
        w = Tensor("w", "float32", [-1, 6])
        total = functional.where(x > 0.0, x, y) + functional.cast(functional.shape(x, 1), "float32")
        functional.matmul(functional.concat([total, y], 0), w).mark_output("z")
        functional.shape(y).mark_output("sizes")
        network = default_trtnet()
        profiles = [OptimizationProfile(), OptimizationProfile()]
        for most, profile in zip((3, 5), profiles, strict=True):
            profile.set_shape("x", (1, 2), (2, 3), (most, 4))
            profile.set_shape("w", (3, 6), (3, 6), (8, 6))
        network.add_profiles(profiles)

    with new_session():
        module = trace(build)
        assert [str(arg.type) for arg in module.main.args] == [
            "f32[x_0, x_1]", "f32[x_0, x_1]", "f32[x_0, x_1]", "f32[x_1, 6]"
        ]  # fmt: skip
        assert module.dims == {"x_0": (1, 2, 5), "x_1": (3, 3, 4)}
        x, y, w = (random.normal(size=size).astype("float32") for size in ((2, 3), (2, 3), (3, 6)))
        got = irc.evaluate(module, {"x": x, "y": y, "w": w, "v": -y})
    assert np.allclose(got["sum"], x - y)
    wanted = np.concatenate([np.where(x > 0, x, y) + 3, y]) @ w
    assert np.allclose(got["z"], wanted, atol=1e-5) and got["sizes"].tolist() == [2, 3]


def test_parameters_hold_the_part_of_one_rank() -> None:
    parameter = Parameter(shape=(2,))  # without a dtype it takes that of its floats
    parameter.value = np.ones(2, np.float16)
    assert parameter.dtype is DataType.HALF
    parameter = Parameter(shape=(2, 3), dtype="float16")
    assert parameter.shape == (2, 3) and parameter.dtype is DataType.HALF
    assert parameter.bound is None
    with pytest.raises(irc.Error, match=r"has the shape \[2, 3\], but its new value has \[3, 2\]"):
        parameter.value = np.zeros((3, 2))
    with pytest.raises(irc.Error, match="has no array"):
        _ = parameter.raw_value
    parameter.value = np.full((2, 3), 1.5)
    assert parameter.raw_value.dtype == np.float16
    assert type_of(parameter) is parameter.type
    with pytest.raises(irc.Error, match="a parameter needs a value or a shape"):
        Parameter(dtype="float32")
