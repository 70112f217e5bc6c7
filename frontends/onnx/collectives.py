"""Collectives: DistCollective of TensorRT, irc's plugin IrcCollective, and their mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Node
from irc.frontends.onnx.rules import Made, reads
from irc.ir.mesh import Mesh
from irc.onnx_format.operators import COLLECTIVE, COLLECTIVES, DOMAIN

_DIST = "collective_operation reduce_op root group_size groups nb_rank"
_PLUGIN = "plugin_version plugin_namespace operation reduce_op group group_size root eps offset"
KINDS = (COLLECTIVE, "IrcCollective")
_SAY = "give the mesh of the file: import_onnx(path, mesh=...)"


def mesh_of(nodes: Sequence[Node], given: Mesh | None, rank: int | None) -> Mesh:
    """The mesh of the collectives of a file; an Error where the `given` one lacks their groups."""
    sizes: dict[str, int] = {}
    for node in nodes if given is None else ():
        name, size = node.text("group", "tp"), _group_size(node)
        if sizes.setdefault(name, size) != size:
            raise Error(
                f"this file has collectives among {sizes[name]} and among {size} ranks; {_SAY}"
            )
    mesh = given or Mesh(tuple(item for item in sizes.items() if "." not in item[0]))
    for node in nodes:
        axis_of(node, mesh, rank)
    return mesh


def _group_size(node: Node) -> int:
    return node.integer("nb_rank" if node.kind == COLLECTIVE else "group_size", 1)


def axis_of(node: Node, mesh: Mesh, rank: int | None) -> str:
    """The axes of the mesh, joined by dots, whose group a node names."""
    size, groups, names = _group_size(node), node.ints("groups") or [], mesh.names
    choices = [names[i:j] for j in range(len(names) + 1) for i in range(j)]
    if node.kind != COLLECTIVE:
        choices = [axes for axes in choices if ".".join(axes) == node.text("group", "")]
    for axes in sorted(choices, key=len):
        fits = mesh.group_size(axes) == size
        if fits and (not groups or _is_group(mesh, axes, groups, rank)):
            return ".".join(axes)
    group = node.text("group", "") or groups or ""
    raise Error(f"{node.kind} among {size} ranks {group} has no group in the mesh ({mesh}); {_SAY}")


def _is_group(mesh: Mesh, axes: tuple[str, ...], group: list[int], rank: int | None) -> bool:
    """Whether ranks are those of a group over these axes, or the positions of all in one."""
    groups = mesh.groups(axes)
    mine = [each for each in groups if rank is None or rank in each]
    return group in mine or group == list(range(len(groups[0])))


@reads("IrcCollective", known=_PLUGIN)
@reads(COLLECTIVE, known=_DIST)
@reads(COLLECTIVE, known=_DIST, domain=DOMAIN)
def collective(b: Builder, node: Node) -> Made:
    """The collective that `operation` or `collective_operation` names, along dimension 0."""
    axis = axis_of(node, b.module.mesh, b.rank)
    kind = node.text("operation" if node.kind != COLLECTIVE else "collective_operation", "")
    cls = ops.AllReduceRmsNorm if kind == "all_reduce_rms_norm" else COLLECTIVES.get(kind)
    if cls is None:
        raise Error(f"{node.kind} with the operation {kind!r}")
    values: dict[str, Any] = {
        "axis": axis,
        "group_size": _group_size(node),
        "op": node.text("reduce_op", "sum"),
        "root": max(node.integer("root", -1), 0),
        "eps": node.real("eps", 1e-6),
        "offset": node.real("offset", 0.0),
        **dict.fromkeys(("dim", "split", "concat"), 0),
    }
    make: Any = cls
    operands = [b.get(node.input(i)) for i in range(len(cls.operand_names))]
    op = make(*operands, **{n: value for n, value in values.items() if n in cls.attribute_types})
    b.pinned.add(op)
    return b.add(op)
