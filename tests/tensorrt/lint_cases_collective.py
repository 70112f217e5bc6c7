"""A fault of collectives or plugins per case."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, helper

from tests.tensorrt.lint_models import FULL, Case, constant, model, node

AMONG = {"group_size": 2, "groups": [0, 1]}
FUSED = "tensorrt-11.4/sm_90"


def comm(
    operation: str = "all_reduce",
    reduce_op: str = "sum",
    root: int = -1,
    types: str = "x:f16[4,8]",
    result: str = "",
    without: str = "",
    **attributes: Any,
) -> ModelProto:
    """One collective of two ranks; `without` is an attribute to leave out."""
    known: dict[str, Any] = {"collective_operation": operation, "reduce_op": reduce_op}
    known |= {"root": root, "nb_rank": 2, **AMONG} | attributes
    known.pop(without, None)
    rows = "y:f16[8,8]" if operation in ("all_gather", "gather") else "y:" + types[2:]
    return model(node("DistCollective", "x", **known), types, result or rows)


def two(**second: Any) -> ModelProto:
    """Two collectives, the first of four ranks."""
    first: dict[str, Any] = {"collective_operation": "all_reduce", "reduce_op": "sum", "root": -1}
    every = first | {"nb_rank": 4, "group_size": 4, "groups": [0, 1, 2, 3]}
    body = [
        node("DistCollective", "x", "a", **every),
        node("DistCollective", "a", **(every | second)),
    ]
    return model(body, "x:f16[4,8]")


def fused(*around: str) -> ModelProto:
    """A collective between two nodes, MatMul and Relu or Casts."""
    before, after = around
    known = {"collective_operation": "all_reduce", "reduce_op": "sum", "root": -1, "nb_rank": 2}
    cast = {"to": 1} if before == "Cast" else {}
    back = {"to": 10} if after == "Cast" else {}
    body = [
        node(before, "x w" if before == "MatMul" else "x", "a", **cast),
        node("DistCollective", "a", "b", **known, **AMONG),
        node(after, "b", **back),
    ]
    return model(body, "x:f16[4,8]", constants=[constant("w:f16[8,8]")])


GATHERED = "y:f16[8,8]"

COLLECTIVES = [
    Case("collective-operation", comm("AllReduce"), comm(), refused="parse"),
    Case("collective-operation", comm(without="collective_operation"), comm()),
    Case("collective-reduction", comm(without="reduce_op"), comm(), refused="parse"),
    Case("collective-reduction", comm(reduce_op="none"), comm(reduce_op="max"), refused="parse"),
    Case("collective-reduction", comm(reduce_op="add"), comm(reduce_op="prod"), refused="parse"),
    Case("collective-reduction", comm("all_gather"), comm("all_gather", "none"), refused="parse"),
    Case("collective-root", comm(without="root"), comm(), refused="parse"),
    Case(
        "collective-root",
        comm("broadcast", "none"),
        comm("broadcast", "none", 1),
        refused="parse",
    ),
    Case("collective-root", comm("broadcast", "none", 2), refused=""),
    Case("collective-group-size", comm(group_size=0), comm(), refused="parse"),
    Case("collective-group-size", comm(groups=[]), refused="parse"),
    Case("collective-group-size", comm(groups=[0, 0]), refused=""),
    Case("collective-ranks", comm("all_gather", "none", without="nb_rank"), refused="build"),
    Case("collective-ranks", comm(without="nb_rank"), comm(), refused=""),
    Case("collective-ranks", comm(nb_rank=4), comm(), refused=""),
    Case(
        "collective-dim-0",
        comm("reduce_scatter", types="x:f16[3,8]", result="y:f16[1,8]"),
        comm("reduce_scatter", types="x:f16[4,8]", result="y:f16[2,8]"),
        refused="build",
    ),
    Case(
        "collective-dim-0",
        comm("reduce_scatter", types="x:f16[]", result="y:f16[]"),
        refused="parse",
    ),
    Case(
        "collective-dtype",
        comm(types="x:f8[4,8]"),
        comm(types="x:bf16[4,8]"),
        target="tensorrt-rtx-1.7/sm_120",
        refused="build",
    ),
    Case("collective-architecture", comm(), target="tensorrt-11.4/sm_75+sm_90"),
    Case("collective-subgroup", two(nb_rank=2, **AMONG), two(), target=FULL),
    Case("collective-subgroup", comm(groups=[1, 3]), comm(), target=FULL),
    Case("collective-subgroup", comm(groups=[1, 3]), comm(), refused=""),
    Case("collective-empty-groups", comm(groups=[], group_size=0), comm(), target=FULL),
    Case("collective-in-fusion", fused("MatMul", "Relu"), fused("Cast", "Cast"), target=FUSED),
    Case("collective-all-gather", comm("all_gather", "none"), comm(), target=FULL),
    Case("collective-silent", comm(), target="tensorrt-11.0/sm_90"),
]


def plugin(
    kind: str = "Mine", version: Any = "1", namespace: str | None = "irc", **fields: Any
) -> ModelProto:
    """One node of a plugin."""
    named = {"plugin_version": version, "plugin_namespace": namespace}
    given = {key: text for key, text in named.items() if text is not None}
    return model(node(kind, "x", "y", "mine", **given, **fields), "x:f16[4,8]")


def ours(inputs: str = "x", outputs: str = "y", **fields: Any) -> ModelProto:
    """The plugin of collectives."""
    given: dict[str, Any] = {"plugin_version": "1", "plugin_namespace": "irc"}
    given |= {"operation": "all_reduce", "reduce_op": "sum", "group": "tp", "ways": "2"}
    given |= {"root": "-1"} | fields
    types = {"x": "x:f16[4,8]", "r": "r:f16[4,8]", "w": "w:f16[8]"}
    results = " ".join(f"{name}:f16[4,8]" for name in outputs.split())
    body = node("IrcCollective", inputs, outputs, **given)
    return model(body, " ".join(types[name] for name in inputs.split()), results)


def versions(second: str) -> ModelProto:
    """Two nodes of one plugin."""
    named = {"plugin_namespace": "irc"}
    body = [
        node("Mine", "x", "a", plugin_version="1", **named),
        node("Mine", "a", plugin_version=second, **named),
    ]
    return model(body, "x:f16[4,8]")


NORM = {"operation": "all_reduce_rms_norm", "eps": "1e-05"}
TABLE = helper.make_tensor("t", 7, [1], [1])

PLUGINS = [
    Case("plugin-version", plugin(version=None), plugin()),
    Case("plugin-version", plugin(namespace=None), plugin()),
    Case("plugin-version", plugin(version=1), plugin()),
    Case("plugin-integers", plugin(size=1 << 40), plugin(size=(1 << 31) - 1)),
    Case("plugin-integers", plugin(sizes=[1, -(1 << 31) - 1]), plugin(sizes=[1, -(1 << 31)])),
    Case("plugin-fields", plugin(table=TABLE), plugin(table="1")),
    Case(
        "plugin-fields",
        plugin(body=helper.make_graph([], "inner", [], [])),
        plugin(),
    ),
    Case("plugin-versions", versions("2"), versions("1")),
    Case("irc-collective", ours(ways=2), ours()),
    Case("irc-collective", ours(ways="0"), ours(ways="8")),
    Case("irc-collective", ours(operation="allreduce"), ours()),
    Case("irc-collective", ours(reduce_op="none"), ours(reduce_op="max")),
    Case("irc-collective", ours(operation="broadcast", reduce_op="none"), ours()),
    Case(
        "irc-collective",
        ours(operation="broadcast", reduce_op="none", root="2"),
        ours(operation="broadcast", reduce_op="none", root="1"),
    ),
    Case("irc-collective", ours(group=""), ours(group="dp.tp")),
    Case("irc-collective", ours(**NORM), ours("x r w", "y z", **NORM)),
]
