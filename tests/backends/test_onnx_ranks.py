"""Models of several ranks: every collective along every dimension, differences of ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from irc.ir.core import Module
from irc.ir.dims import symbol
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.text import parse_module
from tests.backends.decoder import write
from tests.backends.ranks import Builder, agrees, drawn, loaded
from tests.fresh import fresh

B, S = symbol("B"), symbol("S")
GROUPS = [
    ("tp=2", "tp"),
    ("tp=3", "tp"),
    ("cp=2, tp=2", "cp"),
    ("cp=2, tp=2", "cp.tp"),
    ("cp=2, tp=2", "tp.cp"),
]
SHAPE = (2, 12, 3, 24)
SHAPES: tuple[Any, ...] = (SHAPE, (B, 12, S, 24), (1, 12, 1, 24))


def everything(mesh: str, axis: str, type: TensorType) -> Module:
    """Every collective along every dimension, over one argument."""
    made = Builder(mesh, {"x": type})
    x, last = made.function.arg("x"), Mesh.parse(mesh).group_size(tuple(axis.split("."))) - 1
    results = {"rank": made.put("rank", axis=axis)}
    for kind in ("sum", "max", "min", "prod"):
        results[f"all_reduce_{kind}"] = made.collective("all_reduce", x, axis, op=kind)
        results[f"reduce_{kind}"] = made.collective("reduce", x, axis, op=kind, root=last)
        for dim in (1, -1):
            name = f"reduce_scatter_{kind}_{dim % 4}"
            results[name] = made.collective("reduce_scatter", x, axis, op=kind, dim=dim)
    results["broadcast"] = made.collective("broadcast", x, axis, root=last)
    for dim in range(-2, 2):
        results[f"all_gather_{dim % 4}"] = made.collective("all_gather", x, axis, dim=dim)
        results[f"gather_{dim % 4}"] = made.collective(
            "collective_gather", x, axis, dim=dim, root=last
        )
    for dim in (1, -1):
        results[f"scatter_{dim % 4}"] = made.collective(
            "collective_scatter", x, axis, dim=dim, root=last
        )
    for split, concat in product((1, 3), range(4)):
        name = f"all_to_all_{split}_{concat}"
        results[name] = made.collective("all_to_all", x, axis, split=split, concat=concat)
    return made.done(results)


@pytest.mark.parametrize(("mesh", "axis"), GROUPS)
def test_every_collective_along_every_dimension(mesh: str, axis: str, tmp_path: Path) -> None:
    for shape in SHAPES:
        module = everything(mesh, axis, TensorType("f32", shape))
        sizes = shape if shape[0] == 1 else SHAPE
        agrees(module, {"x": drawn(fresh(1), "f32", sizes, module.mesh.ranks)}, tmp_path)


def test_vectors_and_scalars(tmp_path: Path) -> None:
    made = Builder("tp=2", {"v": TensorType("f32", (12,)), "s": TensorType("i32", ())})
    v, s = made.function.args
    results = {
        "gathered": made.collective("all_gather", v, dim=0),
        "scattered": made.collective("reduce_scatter", v, dim=0),
        "turned": made.collective("all_to_all", v, split=0, concat=0),
        "total": made.collective("all_reduce", s),
    }
    rng = fresh(4)
    inputs = {"v": drawn(rng, "f32", (12,), 2), "s": drawn(rng, "i32", (), 2)}
    agrees(made.done(results), inputs, tmp_path)


# -- the emitted model


def nodes(folder: Path, rank: int = 0) -> list[onnx.NodeProto]:
    return list(onnx.load(str(folder / "out" / f"rank{rank}.onnx")).graph.node)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_attributes_of_dist_collective(tmp_path: Path) -> None:
    made = Builder("cp=2, tp=2", {"x": TensorType("f32", (4, 6))})
    x = made.function.arg("x")
    results = {
        "a": made.collective("all_reduce", x, "cp", op="max"),
        "b": made.collective("collective_scatter", x, "tp", dim=0, root=1),
        "c": made.collective("all_gather", x, "tp.cp", dim=0),
    }
    loaded(made.done(results), tmp_path)
    groups = {rank: [attributes(n)["groups"] for n in nodes(tmp_path, rank)] for rank in range(4)}
    assert groups[0] == [[0, 2], [0, 1], [0, 2, 1, 3]]
    assert groups[3] == [[1, 3], [2, 3], [0, 2, 1, 3]]
    a, b, c = map(attributes, nodes(tmp_path))
    assert (a["collective_operation"], a["reduce_op"], a["root"]) == (b"all_reduce", b"max", -1)
    assert (b["collective_operation"], b["reduce_op"], b["root"]) == (b"scatter", b"none", 1)
    assert (c["collective_operation"], c["reduce_op"], c["root"]) == (b"all_gather", b"none", -1)
    assert [(n["group_size"], n["nb_rank"]) for n in (a, b, c)] == [(2, 2), (2, 2), (4, 4)]


@pytest.mark.parametrize(
    ("shape", "op", "at", "kinds"),
    [
        ((4, 6, 8), "all_gather", {"dim": 0}, []),
        ((4, 6, 8), "all_gather", {"dim": 1}, ["Reshape", "Transpose", "Reshape"]),
        ((1, 6, 8), "all_gather", {"dim": 1}, ["Reshape"]),
        ((4, 6, 8), "reduce_scatter", {"dim": 1}, ["Reshape", "Transpose", "Reshape"]),
        ((1, 6, 8), "reduce_scatter", {"dim": 1}, ["Reshape"]),
        ((4, 6, 8), "all_to_all", {"split": 0, "concat": 0}, []),
        ((4, 6, 8), "all_reduce", {}, []),
    ],
)
def test_at_most_one_transpose(
    shape: tuple[int, ...], op: str, at: dict[str, int], kinds: list[str], tmp_path: Path
) -> None:
    made = Builder("tp=2", {"x": TensorType("f32", shape)})
    module = made.done({"y": made.collective(op, made.function.arg("x"), **at)})
    agrees(module, {"x": drawn(fresh(5), "f32", shape, 2)}, tmp_path)
    assert [n.op_type for n in nodes(tmp_path) if n.op_type != "DistCollective"] == kinds


def test_a_group_of_one_rank_is_left_out(tmp_path: Path) -> None:
    made = Builder("tp=2, pp=1", {"x": TensorType("f32", (4, 6))})
    value = made.collective("all_reduce", made.function.arg("x"))
    for op, at in (("all_reduce", {}), ("all_gather", {"dim": 1}), ("reduce_scatter", {"dim": 0})):
        value = made.collective(op, value, "pp", **at)
    value = made.collective("all_to_all", value, "pp", split=0, concat=1)
    agrees(made.done({"y": value}), {"x": drawn(fresh(6), "f32", (4, 6), 2)}, tmp_path)
    assert [node.op_type for node in nodes(tmp_path)] == ["DistCollective"]


RANKS = """module @m local mesh(cp=2, tp=2) {
  weight @w : f32[6, 4]{varies tp} = random("w", 1, 0.5, [12, 4]).shard(0, tp)
  func @forward(%x: f32[3, 4]{varies cp tp}) -> (f32[3, 6]{varies tp}) {
    %1 = rank {axis="cp"} : i32[]{varies cp}
    %2 = rank {axis="tp.cp"} : i32[]{varies tp cp}
    %3 = rank {axis="cp"} : i32[]{varies cp}
    %4 = add %1, %2 : i32[]{varies cp tp}
    %5 = add %4, %3 : i32[]{varies cp tp}
    %6 = cast %5 {dtype="f32"} : f32[]{varies cp tp}
    %y = linear %x, @w : f32[3, 6]{varies cp tp}
    %z = add %y, %6 : f32[3, 6]{varies cp tp}
    %s = all_reduce %z {axis="cp", group_size=2} : f32[3, 6]{varies tp}
    return %s
  }
}"""


def test_ranks_differ_in_positions_groups_and_weights_alone(tmp_path: Path) -> None:
    module = parse_module(RANKS)
    agrees(module, {"x": drawn(fresh(7), "f32", (3, 4), 4)}, tmp_path)
    models = [
        onnx.load(str(tmp_path / f"out/rank{r}.onnx"), load_external_data=False) for r in range(4)
    ]
    for rank, model in enumerate(models):
        tensors = {t.name: t for t in model.graph.initializer}
        held = {
            name: int(onnx.numpy_helper.to_array(tensors[name]))
            for name in tensors
            if name.startswith("rank")
        }
        assert held == {"rank.cp": rank // 2, "rank.tp.cp": rank % 2 * 2 + rank // 2}
        for tensor in tensors.values():
            tensor.ClearField("raw_data")
            del tensor.external_data[:]
        for node in model.graph.node:
            for attribute in node.attribute:
                attribute.ClearField("ints")
        del model.metadata_props[:]
    assert models[1:] == models[:1] * 3


def test_bytes_that_several_ranks_need_are_written_once(tmp_path: Path) -> None:
    """Rows in place, columns per rank, replicated weights that need conversion once."""
    rng = fresh(9)
    arrays = {name: rng.standard_normal((6, 4)).astype(np.float32) for name in "abcd"}
    write(tmp_path / "m.safetensors", arrays)
    text = """module @m local mesh(dp=2, tp=2) {
      file @f = "m.safetensors"
      weight @rows : f32[3, 4]{varies tp} = @f["a"].shard(0, tp)
      weight @columns : f32[6, 2]{varies tp} = @f["b"].shard(1, tp)
      weight @turned : f32[4, 6] = @f["c"].transpose(1, 0)
      weight @quarter : f32[6, 1]{varies dp tp} = @f["d"].shard(1, dp.tp)
      weight @whole : f32[6, 4] = @f["d"]
      func @forward(%x: f32[6]{varies dp tp})
        -> (f32[3, 4]{varies tp}, f32[6, 2]{varies tp}, f32[4, 6], f32[6, 1]{varies dp tp},
          f32[6, 4]) {
        return @rows, @columns, @turned, @quarter, @whole
      }
    }"""
    module = parse_module(text)
    agrees(module, {"x": drawn(rng, "f32", (6,), 4)}, tmp_path)
    found = [
        {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
        for model in (
            onnx.load(str(tmp_path / f"out/rank{r}.onnx"), load_external_data=False)
            for r in range(4)
        )
    ]
    files = [{name: place["location"] for name, place in each.items()} for each in found]
    own = {"rows": "m.safetensors", "whole": "m.safetensors", "columns": "shared.weights"}
    own |= {"turned": "shared.weights"}
    assert files == [own | {"quarter": f"rank{rank}.weights"} for rank in range(4)]
    assert len({each["turned"]["offset"] for each in found}) == 1
    assert [found[r]["columns"]["offset"] == found[0]["columns"]["offset"] for r in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.weights")}
    assert sizes["shared.weights"] == 2 * 4096 + 4 * 6 * 4 and sizes["rank3.weights"] == 24
