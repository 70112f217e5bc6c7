"""Types and meshes: interning, text, groups, and what they and operations refuse."""

import pickle
from typing import Any

import pytest

from irc.errors import Error
from irc.ir.core import Value
from irc.ir.dims import symbol
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ops import Add, Linear, Mul, Silu, Softmax
from irc.text.cursor import Cursor
from irc.text.literals import parse_type

S = symbol("S")


def test_equal_types_are_one_object() -> None:
    a = TensorType("bf16", (S, 64), ((), ("tp",)), ("pp", "dp"))
    b = TensorType("bf16", (symbol("S"), 64), ((), ("tp",)), ("dp", "pp"))
    assert a is b
    assert str(a) == "bf16[S, 64@tp]{sum dp pp}"
    assert pickle.loads(pickle.dumps(a)) is a


def test_several_axes_on_one_dimension() -> None:
    assert str(TensorType("f32", (S,), (("cp", "tp"),))) == "f32[S@cp.tp]"


def test_replicated_drops_sharding_only() -> None:
    assert TensorType("i8", (4,), (("tp",),)).replicated is TensorType("i8", (4,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("f33", (1,)), "no dtype called 'f33'; did you mean"),
        (("f32", (-1,)), "a dimension cannot be negative"),
        (("f32", (1 << 63,)), "the dimension 9223372036854775808 is too large"),
        (("f32", (symbol("S") * (1 << 63),)), "the dimension 9223372036854775808\\*S is too large"),
        (("f32", (1.5,)), "a dimension is an int or a symbol, not 1.5"),
        (("f32", (4, 4), (("tp",), ("tp",))), "mesh axis 'tp' is used twice"),
        (("f32", (4,), (("tp",),), ("tp",)), "mesh axis 'tp' is used twice"),
        (("f32", (4,), ((), ())), "1 dimensions but 2 entries of axes"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(Error, match=message):
        TensorType(*arguments)  # type: ignore[arg-type]


def test_mesh_counts_through_the_last_axis_first() -> None:
    mesh = Mesh.parse("pp=2, tp=3")
    assert mesh.ranks == 6
    assert mesh.coordinates(4) == {"pp": 1, "tp": 1}
    assert mesh.groups(("tp",)) == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups(("pp",)) == [[0, 3], [1, 4], [2, 5]]
    assert mesh.groups(("pp", "tp")) == [[0, 1, 2, 3, 4, 5]]
    assert mesh.groups(("tp", "pp")) == [[0, 3, 1, 4, 2, 5]]


def test_index_follows_the_groups() -> None:
    mesh = Mesh.parse("dp=2, cp=2, tp=3")
    for axes in (("tp",), ("cp", "tp"), ("tp", "dp")):
        for group in mesh.groups(axes):
            assert [mesh.index(rank, axes) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "cannot read the mesh axis 'tp'"),
        ("tp=2,tp=3", "the mesh has the axis 'tp' twice"),
        ("tp=0", "must have at least one rank"),
        ("tp=" + "9" * 5000, "cannot read the mesh axis"),
        *[(each, "a mesh is text") for each in (3, ["tp=2"], None)],
        *[({"tp": each}, "names of axes and whole numbers") for each in ("2", 2.5, True)],
        ({2: 2}, "names of axes and whole numbers"),
        ({"tp": 0}, "tp=0 must have at least one rank"),
        ({"t p": 2}, "'t p' is not a valid name for a mesh axis"),
    ],
)
def test_bad_meshes(text: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        Mesh.parse(text)


def test_a_mesh_is_a_table_of_axes_as_well() -> None:
    assert Mesh.parse({"tp": 2, "pp": 3}) == Mesh.parse("pp=3,tp=2")
    assert Mesh.parse({}) == Mesh.parse("")
    assert Mesh.parse(Mesh.parse("tp=2")) == Mesh.parse("tp=2")


def test_unknown_axis_names_the_nearest() -> None:
    with pytest.raises(Error, match="has no axis 'tpp'; did you mean 'tp'"):
        Mesh.parse("tp=2").size("tpp")


def value(type: str) -> Value:
    return Value(parse_type(Cursor(type, "type")), None, 0, "x")


def linear(x: Value, weight: Value, bias: Value) -> Linear:
    return Linear(x, weight, bias=bias)


PARTIAL, REPLICATED = "f32[4, 8]{sum tp}", "f32[4, 8]"


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        (Silu, [PARTIAL], "silu needs complete operands, but x is a partial sum over tp"),
        (Add, [PARTIAL, REPLICATED], "add mixes a partial sum over tp with a complete"),
        (Mul, [PARTIAL, PARTIAL], "mul multiplies partial sums"),
        (
            Linear,
            ["f32[4, 8@tp]", "f32[6, 8]"],
            "dimension 'k' is sharded over tp in x and replicated in w",
        ),
        (
            Add,
            ["f32[4, 8@tp]", "f32[4, 8@dp]"],
            "a leading dimension is sharded over tp in x and sharded over dp in y",
        ),
        (Softmax, ["f32[4, 8@tp]"], "softmax needs dimension .* replicated"),
        (linear, ["f32[4, 8@tp]", "f32[6, 8@tp]", "f32[6]"], "would add bias once per rank of tp"),
        (linear, [PARTIAL, "f32[6, 8]", "f32[6]"], "mixes a partial sum"),
    ],
)
def test_axes_and_sums_that_an_operation_refuses(
    op: Any, operands: list[str], message: str
) -> None:
    with pytest.raises(Error, match=message):
        op(*map(value, operands))
