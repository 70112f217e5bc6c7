"""Collectives against numpy on meshes and groups, and their types in the global view; lookups in
sharded tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate, evaluate_ranks
from irc.errors import Error
from irc.ir.core import Function, Module, Result, Value
from irc.ir.declare import op_class
from irc.ir.mesh import Mesh
from irc.ir.types import Axes, TensorType
from irc.ir.verify import verify
from irc.ops import Embedding, Rank, Return
from irc.text import parse_module
from tests.fresh import fresh

RNG = fresh(11)
MESHES = ["tp=1", "tp=2", "tp=3", "tp=4", "dp=2, tp=2", "tp=2, dp=2", "dp=2, tp=3", "pp=1, tp=2"]
SHAPE = (12, 2, 12)
X = np.ones((4, 6), np.float32)
Arrays = list[np.ndarray]


def run(op: str, mesh: Mesh, shards: Arrays, axis: str = "tp", /, **attributes: Any) -> Arrays:
    """The results of a collective in the local view, per rank, from the operands per rank."""
    module = Module("m", mesh, local=True)
    type = TensorType("f32", shards[0].shape)
    own = type.part_of(type.replace(varying=mesh.names))
    function = Function("forward", [("x", own)])
    function.results = (Result(varies=True),)
    group_size = mesh.group_size(tuple(axis.split(".")))
    made = op_class(op)(function.arg("x"), axis=axis, group_size=group_size, **attributes)
    function.append(made)
    function.append(Return(made.results))
    module.add_function(function)
    return [results["result0"] for results in evaluate_ranks(module, {"x": shards})]


def drawn(mesh: Mesh) -> Arrays:
    """One random operand per rank."""
    return [RNG.standard_normal(SHAPE).astype(np.float32) for _ in range(mesh.ranks)]


def neighbours(mesh: Mesh, rank: int, axis: str = "tp") -> tuple[list[int], int]:
    """(the ranks of this rank's group in order, its index in the group), from coordinates."""
    here = mesh.coordinates(rank)
    others = {name: at for name, at in here.items() if name != axis}
    group = [r for r in range(mesh.ranks) if others.items() <= mesh.coordinates(r).items()]
    group.sort(key=lambda r: mesh.coordinates(r)[axis])
    return group, here[axis]


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """A mesh with an axis tp."""
    return Mesh.parse(request.param)


REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("all_reduce", {"op": kind}) for kind in REDUCTIONS),
    *(("reduce_scatter", {"op": kind, "dim": -1}) for kind in REDUCTIONS),
    *(("reduce", {"op": kind, "root": -1}) for kind in REDUCTIONS),
    *(("all_gather", {"dim": dim}) for dim in (0, 2)),
    *(("all_to_all", {"split": a, "concat": b}) for a, b in ((0, 2), (2, 1), (0, 0))),
    ("broadcast", {"root": -1}),
    ("collective_gather", {"root": -1, "dim": 1}),
    ("collective_scatter", {"root": -1, "dim": 0}),
]


def by_numpy(name: str, shards: Arrays, place: int, **given: Any) -> np.ndarray:
    """The result of the rank at a place in the group, from the group's operands in order."""
    dim, root, count = given.get("dim", 0), given.get("root", 0), len(shards)
    total = reduce(REDUCTIONS[given.get("op", "sum")], shards)
    match name:
        case "all_reduce" | "reduce":
            return total if name == "all_reduce" or place == root else np.zeros_like(total)
        case "reduce_scatter":
            return np.split(total, count, dim)[place]
        case "all_gather" | "collective_gather":
            joined = np.concatenate(shards, dim)
            return joined if name == "all_gather" or place == root else np.zeros_like(joined)
        case "broadcast":
            return shards[root]
        case "collective_scatter":
            return np.split(shards[root], count, dim)[place]
        case _:
            parts = [np.split(shard, count, given["split"])[place] for shard in shards]
            return np.concatenate(parts, given["concat"])


@pytest.mark.parametrize(("op", "attributes"), CASES)
def test_every_collective(mesh: Mesh, op: str, attributes: dict[str, Any]) -> None:
    shards = drawn(mesh)
    if "root" in attributes:
        attributes = attributes | {"root": mesh.size("tp") - 1}
    for rank, result in enumerate(run(op, mesh, shards, **attributes)):
        group, place = neighbours(mesh, rank)
        wanted = by_numpy(op, [shards[r] for r in group], place, **attributes)
        np.testing.assert_array_equal(result, wanted)


def test_a_group_over_two_axes_counts_the_last_fastest() -> None:
    mesh = Mesh.parse("dp=2, tp=2")
    shards = drawn(mesh)
    for axis, order in (("dp.tp", [0, 1, 2, 3]), ("tp.dp", [0, 2, 1, 3])):
        for result in run("all_gather", mesh, shards, axis, dim=0):
            np.testing.assert_array_equal(result, np.concatenate([shards[r] for r in order]))


def test_rank_is_the_index_in_the_group(mesh: Mesh) -> None:
    module = Module("m", mesh, local=True)
    function = Function("forward")
    function.results = (Result(varies=True),)
    function.append(op := Rank(axis="tp"))
    function.append(Return(op.results))
    module.add_function(function)
    places = [int(results["result0"]) for results in evaluate_ranks(module, {})]
    assert places == [mesh.coordinates(rank)["tp"] for rank in range(mesh.ranks)]


def typed(op: str, axes: tuple[Axes, ...] = (), partial: Axes = (), /, **attributes: Any) -> str:
    """The text of the result type in the global view, over f32[8, 6] with this sharding."""
    function = Function("forward", [("x", TensorType("f32", (8, 6), axes, partial))])
    return str(op_class(op)(function.arg("x"), **({"axis": "tp"} | attributes)).result.type)


SPLIT: tuple[Axes, ...] = (("cp", "tp"), ())


@pytest.mark.parametrize(
    ("wanted", "op", "axes", "partial", "attributes"),
    [
        ("f32[8, 6]", "all_reduce", (), ("tp",), {}),
        ("f32[8, 6]{sum dp}", "all_reduce", (), ("dp", "tp"), {}),
        ("f32[8, 6]", "all_reduce", (), ("dp", "tp"), {"axis": "dp.tp"}),
        ("f32[8@cp, 6]", "all_gather", SPLIT, (), {"dim": 0}),
        ("f32[8, 6]", "all_gather", SPLIT, (), {"dim": 0, "axis": "cp.tp"}),
        ("f32[8@cp.tp, 6]", "reduce_scatter", (("cp",), ()), ("tp",), {"dim": 0}),
        ("f32[8, 6@tp]{sum dp}", "reduce_scatter", (), ("dp", "tp"), {"dim": -1}),
        ("f32[8@cp, 6@tp]", "all_to_all", SPLIT, (), {"split": 1, "concat": 0}),
        ("f32[8@cp, 6]", "broadcast", (("cp",), ()), (), {}),
        ("f32[8, 6]{sum dp}", "broadcast", (), ("dp",), {}),
        ("f32[8, 6]{sum tp}", "reduce", (), ("tp",), {}),
        ("f32[8@cp, 6]{sum tp}", "collective_gather", SPLIT, (), {"dim": 0}),
        ("f32[8@cp.tp, 6]", "collective_scatter", (("cp",), ()), (), {"dim": 0}),
    ],
)
def test_global_types(
    wanted: str, op: str, axes: tuple[Axes, ...], partial: Axes, attributes: dict[str, Any]
) -> None:
    assert typed(op, axes, partial, **attributes) == wanted


@pytest.mark.parametrize(
    ("message", "op", "axes", "partial", "attributes"),
    [
        ("is not a partial sum over it", "all_reduce", (), ("dp",), {}),
        ("all_reduce over dp.tp: the operand is", "all_reduce", (), ("dp",), {"axis": "dp.tp"}),
        ("is used twice in one type", "collective_scatter", (), (), {"dim": 0, "axis": "tp.tp"}),
        (r"is not sharded over it\n", "all_gather", SPLIT, (), {"dim": 1}),
        ("or not innermost", "all_gather", SPLIT, (), {"dim": 0, "axis": "cp"}),
        ("must be replicated on the root", "broadcast", SPLIT, (), {}),
        ("no rank -1", "broadcast", (), (), {"root": -1}),
        ("group_size cannot be negative", "broadcast", (), (), {"group_size": -1}),
    ],
)
def test_invalid_types_and_attributes_are_refused(
    message: str, op: str, axes: tuple[Axes, ...], partial: Axes, attributes: dict[str, Any]
) -> None:
    with pytest.raises(Error, match=message):
        typed(op, axes, partial, **attributes)


def text(local: str, line: str) -> Module:
    """A module over %x that returns %y."""
    shape = line.rpartition(": ")[2]
    return parse_module(
        f"""module @m {local} mesh(tp=2) {{
          func @forward(%x: f32[4, 6]) -> ({shape}) {{
            %y = {line}
            return %y
          }}
        }}"""
    )


@pytest.mark.parametrize("check", [verify, lambda module: evaluate(module, {"x": X})])
@pytest.mark.parametrize(
    ("view", "line", "message"),
    [
        ("", 'broadcast %x {axis="tp", group_size=2} : f32[4, 6]', "is for the local view, and"),
        ("local", 'broadcast %x {axis="tp"} : f32[4, 6]', r"=0, but the mesh \(tp=2\) has 2 ranks"),
        (
            "local",
            'all_gather %x {axis="tp", dim=0, group_size=4} : f32[16, 6]',
            "=4, but the mesh",
        ),
        ("local", 'broadcast %x {axis="tpp", group_size=2} : f32[4, 6]', "did you mean 'tp'"),
        ("", 'rank {axis="tp"} : i32[]', r"but rank gives i32\[\]\{varies tp\}"),
        ("local", 'rank {axis="dp"} : i32[]{varies dp}', "has no axis 'dp'"),
    ],
)
def test_a_collective_fits_the_view_and_the_mesh(
    check: Callable[[Module], object], view: str, line: str, message: str
) -> None:
    with pytest.raises(Error, match=message):
        check(text(view, line))


# lookups in sharded tables


CYCLIC = """
module @m mesh(tp=2) {{
  func @forward(%ids: i32[4, 3], %t: f32[8@tp, 2]) -> (y: f32[4, 3{split}, 2], lost: i32[]) {{
    %y, %lost = cyclic_embedding %ids, %t {{{attributes}}} : f32[4, 3{split}, 2], i32[]
    return %y, %lost
  }}
}}"""


def cyclic(attributes: str, split: str = "") -> Module:
    module = parse_module(CYCLIC.format(split=split, attributes=attributes))
    verify(module)
    return module


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('rows=8, parts=4, axis="tp"', "has 4 parts, but the mesh .tp=2. has 2 ranks over tp"),
        ('rows=8, parts=2, axis="tp", capacity=1, queues=[2, 1]', r"ids have the shards \[1, 1\]"),
        ('rows=8, parts=2, axis="xp"', "the table is f32.8@tp, 2., but its rows must be sharded"),
    ],
)
def test_a_cyclic_lookup_must_fit_the_mesh(attributes: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        cyclic(attributes)


def test_a_cyclic_lookup_is_for_the_global_view() -> None:
    module = cyclic('rows=8, parts=2, axis="tp"')
    module.local = True
    op = next(iter(module.main))
    with pytest.raises(Error, match="for the global view only; localize lowers it"):
        op.verify(module)


def test_ids_beyond_the_capacity_give_zeros_and_are_counted() -> None:
    module = cyclic('rows=7, parts=2, axis="tp", scatter=1, capacity=2, queues=[1, 2]', split="@tp")
    ids = np.array([[0, 2, 1], [4, 1, 3], [6, 9, 5], [-1, 0, 5]], np.int32)
    table = np.arange(1, 17, dtype=np.float32).reshape(8, 2)
    results = evaluate(module, {"ids": ids, "t": table})
    # the first rank wants columns 0 and 1: of its even ids 0, 2, 4, 6, 0 two find room
    place = [[0, 1, 4], [None, 4, 5], [None, None, None], [None, None, None]]
    want = np.zeros((4, 3, 2), np.float32)
    for i, j in product(range(4), range(3)):
        if place[i][j] is not None:
            want[i, j] = table[place[i][j]]
    assert np.array_equal(results["y"], want)
    assert results["lost"] == 5


def test_an_out_of_range_id_with_inside_is_an_error() -> None:
    ids, table = (
        Value(TensorType(*t), None, i) for i, t in enumerate((("i32", (2,)), ("f32", (3, 1))))
    )
    op = Embedding(ids, table, inside=True)
    rows = np.arange(3, dtype=np.float32)[:, None]
    assert op.evaluate(np.array([2, 0]), rows).tolist() == [[2], [0]]
    for wrong in (-1, 3):
        with pytest.raises(
            Error, match=f"embedding: index {wrong} is out of range of a dimension of 3"
        ):
            op.evaluate(np.array([0, wrong]), rows)
