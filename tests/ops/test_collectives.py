"""Collectives against numpy on meshes and groups, and their types in the global view."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate, evaluate_ranks
from irc.errors import Error
from irc.ir.core import Function, Module, Result
from irc.ir.declare import op_class
from irc.ir.mesh import Mesh
from irc.ir.types import Axes, TensorType
from irc.ir.verify import verify
from irc.ops import Rank, Return
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


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(mesh: Mesh, kind: str) -> None:
    shards, group_size, root = drawn(mesh), mesh.size("tp"), mesh.size("tp") - 1
    everywhere = run("all_reduce", mesh, shards, op=kind)
    scattered = run("reduce_scatter", mesh, shards, op=kind, dim=-1)
    at_root = run("reduce", mesh, shards, op=kind, root=root)
    for rank in range(mesh.ranks):
        group, place = neighbours(mesh, rank)
        total = reduce(REDUCTIONS[kind], [shards[r] for r in group])
        width = 12 // group_size
        np.testing.assert_array_equal(everywhere[rank], total)
        part = total[:, :, place * width : (place + 1) * width]
        np.testing.assert_array_equal(scattered[rank], part)
        np.testing.assert_array_equal(at_root[rank], total * (place == root))


def test_all_gather(mesh: Mesh) -> None:
    shards = drawn(mesh)
    for dim in (0, 2):
        for rank, found in enumerate(run("all_gather", mesh, shards, dim=dim)):
            group, _ = neighbours(mesh, rank)
            np.testing.assert_array_equal(found, np.concatenate([shards[r] for r in group], dim))


def test_all_to_all(mesh: Mesh) -> None:
    shards, group_size = drawn(mesh), mesh.size("tp")
    for split, concat in ((0, 2), (2, 1), (0, 0)):
        size = 12 // group_size
        for rank, found in enumerate(run("all_to_all", mesh, shards, split=split, concat=concat)):
            group, place = neighbours(mesh, rank)
            mine = range(place * size, (place + 1) * size)
            parts = [np.take(shards[r], mine, axis=split) for r in group]
            np.testing.assert_array_equal(found, np.concatenate(parts, concat))


def test_rooted_collectives(mesh: Mesh) -> None:
    shards, group_size = drawn(mesh), mesh.size("tp")
    root = group_size - 1
    sent = run("broadcast", mesh, shards, root=root)
    gathered = run("collective_gather", mesh, shards, root=root, dim=1)
    scattered = run("collective_scatter", mesh, shards, root=root, dim=0)
    for rank in range(mesh.ranks):
        group, place = neighbours(mesh, rank)
        theirs = shards[group[root]]
        joined = np.concatenate([shards[r] for r in group], 1)
        size = 12 // group_size
        np.testing.assert_array_equal(sent[rank], theirs)
        np.testing.assert_array_equal(gathered[rank], joined * (place == root))
        part = theirs[place * size : (place + 1) * size]
        np.testing.assert_array_equal(scattered[rank], part)


def test_a_group_over_two_axes_counts_the_last_fastest() -> None:
    mesh = Mesh.parse("dp=2, tp=2")
    shards = drawn(mesh)
    for axis, order in (("dp.tp", [0, 1, 2, 3]), ("tp.dp", [0, 2, 1, 3])):
        for found in run("all_gather", mesh, shards, axis, dim=0):
            np.testing.assert_array_equal(found, np.concatenate([shards[r] for r in order]))


def test_rank_is_the_index_in_the_group(mesh: Mesh) -> None:
    module = Module("m", mesh, local=True)
    function = Function("forward")
    function.results = (Result(varies=True),)
    function.append(op := Rank(axis="tp"))
    function.append(Return(op.results))
    module.add_function(function)
    found = [int(results["result0"]) for results in evaluate_ranks(module, {})]
    assert found == [mesh.coordinates(rank)["tp"] for rank in range(mesh.ranks)]


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
