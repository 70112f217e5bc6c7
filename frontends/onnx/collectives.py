"""Collectives between ranks: DistCollective of TensorRT, our plugin IrcCollective, and the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irc import ops
from irc.core import Op
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.rules import Made, reads
from irc.mesh import Mesh

_DIST = "collective_operation reduce_op root group_size groups nb_rank"
_PLUGIN = "plugin_version plugin_namespace operation reduce_op group ways root eps offset"
KINDS = ("DistCollective", "IrcCollective")
_OPS: dict[str, type[Op]] = {
    "all_reduce": ops.AllReduce,
    "all_gather": ops.AllGather,
    "reduce_scatter": ops.ReduceScatter,
    "all_to_all": ops.AllToAll,
    "broadcast": ops.Broadcast,
    "reduce": ops.Reduce,
    "gather": ops.CollectiveGather,
    "scatter": ops.CollectiveScatter,
}


def mesh_of(nodes: Sequence[Node], given: Mesh | None, rank: int | None) -> Mesh:
    """The mesh of the collectives of a file: the one that is given, if it has their groups."""
    sizes: dict[str, int] = {}
    for node in nodes:
        if node.kind == "IrcCollective" and "." not in node.text("group", ""):
            sizes[node.text("group", "tp")] = node.integer("ways", 1)
    ways = {node.integer("nb_rank", 1) for node in nodes if node.kind == "DistCollective"}
    if given is not None:
        mesh = given
    elif sizes:
        mesh = Mesh.parse(",".join(f"{name}={size}" for name, size in sizes.items()))
    elif len(ways) == 1:
        mesh = Mesh((("tp", ways.pop()),))
    elif not ways:
        return Mesh()
    else:
        raise Error(
            f"the collectives of this file have groups of {' and '.join(map(str, sorted(ways)))} "
            "ranks; say which mesh they belong to: import_onnx(path, mesh=...)"
        )
    for node in nodes:
        axis_of(node, mesh, rank)
    return mesh


def axis_of(node: Node, mesh: Mesh, rank: int | None) -> str:
    """The axes of the mesh, joined by dots, whose group a node names."""
    if node.kind == "IrcCollective":
        group, ways = node.text("group", ""), node.integer("ways", 1)
        if not all(name in mesh.names for name in group.split(".")):
            raise Error(f"IrcCollective over {group!r}, which the mesh ({mesh}) does not have")
        if mesh.ways(tuple(group.split("."))) != ways:
            raise Error(f"IrcCollective over {group!r} with {ways} ranks; the mesh is ({mesh})")
        return group
    ways, groups = node.integer("nb_rank", 1), node.ints("groups") or []
    for axes in _choices(mesh):
        fits = mesh.ways(axes) == ways
        if fits and (not groups or _is_group(mesh, axes, groups, rank)):
            return ".".join(axes)
    raise Error(
        f"DistCollective among {groups or ways} has no axis of the mesh ({mesh}); "
        "say which mesh it belongs to: import_onnx(path, mesh=...)"
    )


def _choices(mesh: Mesh) -> list[tuple[str, ...]]:
    names = mesh.names
    return [
        names[i:j] for n in range(1, len(names) + 1) for i in range(len(names)) for j in [i + n]
    ]


def _is_group(mesh: Mesh, axes: tuple[str, ...], group: list[int], rank: int | None) -> bool:
    """Whether ranks are those of a group, or the positions of all in one."""
    groups = mesh.groups(axes)
    mine = [each for each in groups if rank is None or rank in each]
    return group in mine or group == list(range(len(groups[0])))


@reads("DistCollective", known=_DIST)
def distributed(b: Builder, node: Node) -> Made:
    return _collective(b, node, node.text("collective_operation", ""), node.integer("root", -1))


@reads("IrcCollective", known=_PLUGIN)
def of_plugin(b: Builder, node: Node) -> Made:
    kind = node.text("operation", "")
    if kind != "all_reduce_rms_norm":
        return _collective(b, node, kind, node.integer("root", -1))
    axis = axis_of(node, b.module.mesh, b.rank)
    x, residual, weight = (b.get(node.input(i)) for i in range(3))
    ways, eps = node.integer("ways", 1), node.decimal("eps", "1e-06")
    offset = node.decimal("offset", "0.0")
    op = ops.AllReduceRmsNorm(x, residual, weight, axis=axis, eps=eps, offset=offset, ways=ways)
    b.pinned.add(op)
    return [b.entry(value) for value in b.add(op).results]


def _collective(b: Builder, node: Node, kind: str, root: int) -> Entry:
    cls = _OPS.get(kind)
    if cls is None:
        raise Error(f"{node.kind} with the operation {kind!r}")
    mesh = b.module.mesh
    axis = axis_of(node, mesh, b.rank)
    extra: dict[str, Any] = {"axis": axis, "ways": mesh.ways(tuple(axis.split(".")))}
    names = cls.attribute_types
    extra |= {"op": node.text("reduce_op", "sum")} if "op" in names else {}
    extra |= {"root": max(root, 0)} if "root" in names else {}
    extra |= {"dim": 0} if "dim" in names else {}
    extra |= {"split": 0, "concat": 0} if "split" in names else {}
    alike = kind in ("all_reduce", "broadcast", "reduce")
    values, result = b.together([node.input(0)]) if alike else ([b.get(node.input(0))], b.entry)
    make: Any = cls
    op = make(values[0], **extra)
    b.pinned.add(op)
    return result(b.value(op))
