"""Examples of the operations on sharded tables and tensors."""

from __future__ import annotations

from typing import Any

from irc.ir.dims import symbol
from tests.ops.example import FLOATS, Arg, Bad, Example

B, S = symbol("B"), symbol("S")
TP, NONE = ("tp",), ()

SPLIT = Arg((4, 6), axes=(NONE, TP))
SLICES = [
    Example(
        "shard_slice",
        (Arg((B * 2, 7)),),
        {"axis": "tp", "dim": 0},
        (
            Bad("must be replicated", (SPLIT,), {"axis": "tp", "dim": 0}),
            Bad("must be replicated", (Arg((4,), partial=TP),), {"axis": "tp", "dim": 0}),
            Bad("no dimension 2", (Arg((4, 6)),), {"axis": "tp", "dim": 2}),
            Bad("not a mesh axis", (Arg((4, 6)),), {"axis": "t p", "dim": 1}),
        ),
        (*FLOATS, "i32"),
        {"B": 3},
        "tp=2",
    ),
    Example("shard_slice", (Arg((5, 7)),), {"axis": "dp.tp", "dim": -1}, mesh="dp=2, tp=2"),
]

TP_AXIS = {"axis": "tp"}
SUMMED = Arg((B, 6), partial=TP)
ADDED = (Arg((4, 6)), Arg((4, 6)), Arg((6,)))
PER_RANK = {"axis": "tp", "offset": 1.0, "group_size": 2}
SUM_BAD = (
    Bad("not a partial sum over it", ADDED[:2], {"axis": "tp"}),
    Bad("but x", (SUMMED, Arg((3, B, 6))), {"axis": "tp"}),
    Bad("not a mesh axis", (SUMMED, Arg((B, 6))), {"axis": ""}),
)
LOCAL_SUM = {"axis": "tp", "group_size": 2}
SHARDS = (Arg((B, 4), axes=(NONE, TP)), Arg((6, 4), axes=(NONE, TP)))
FUSED = [
    Example("all_reduce_add", (SUMMED, Arg((B, 6))), TP_AXIS, SUM_BAD, sizes={"B": 3}, mesh="tp=2"),
    Example("all_reduce_add", ADDED[:2], LOCAL_SUM, mesh="tp=2", local=True),
    Example(
        "fused_linear",
        (*SHARDS, Arg((B, 6), name="residual")),
        TP_AXIS,
        (
            Bad("not a partial sum over it", (Arg((B, 4)), Arg((6, 4))), TP_AXIS),
            Bad("not a mesh axis", SHARDS, {"axis": "t p"}),
            Bad("but the product", (*SHARDS, Arg((B, 1), name="residual")), TP_AXIS),
        ),
        sizes={"B": 3},
        mesh="tp=2",
    ),
    Example("fused_linear", (Arg((3, 4)), Arg((6, 4))), LOCAL_SUM, mesh="tp=2", local=True),
    Example(
        "fused_linear",
        (*(Arg((3, 4)), Arg((6, 4))), *(Arg((4,), name="norm"), Arg((3, 6), name="residual"))),
        LOCAL_SUM | {"act": "relu"},
        mesh="tp=2",
        local=True,
    ),
    Example(
        "all_reduce_rms_norm",
        (SUMMED, Arg((B, 6)), Arg((6,))),
        {"axis": "tp", "eps": 1e-5},
        (
            Bad("not a partial sum over it", ADDED, {"axis": "tp"}),
            Bad("but x", (SUMMED, Arg((3, B, 6)), Arg((6,))), {"axis": "tp"}),
            Bad("the 6 features of x", (SUMMED, Arg((B, 6)), Arg((5,))), {"axis": "tp"}),
            Bad("not a mesh axis", (SUMMED, Arg((B, 6)), Arg((6,))), {"axis": ""}),
        ),
        sizes={"B": 3},
        mesh="tp=2",
    ),
    Example("all_reduce_rms_norm", ADDED, PER_RANK, mesh="tp=2", local=True),
]

FIRST = {"k": 1, "axis": "tp", "dim": 0}
CHOICES = [
    Example(
        "sharded_topk",
        (Arg((B, 9), axes=(NONE, TP)),),
        {"k": 4, "axis": "tp"},
        (
            Bad("must be sharded over it", (Arg((4, 6)),), {"k": 1, "axis": "tp"}),
            Bad("must be sharded over it", (SPLIT,), {"k": 1, "axis": "tp", "dim": 0}),
            Bad("nothing partial", (Arg((4,), partial=TP),), {"k": 1, "axis": "tp"}),
            Bad("beyond", (SPLIT,), {"k": 7, "axis": "tp"}),
            Bad("beyond", (SPLIT,), {"k": 0, "axis": "tp"}),
            Bad("no dimension 2", (SPLIT,), {"k": 1, "axis": "tp", "dim": 2}),
            Bad("takes numbers", (Arg((6,), "bool", axes=(TP,)),), {"k": 1, "axis": "tp"}),
        ),
        (*FLOATS, "i32"),
        {"B": 3},
        "tp=2",
    ),
    Example("sharded_topk", (Arg((5, 3), axes=(TP, NONE)),), FIRST, mesh="tp=4"),
    Example(
        "sharded_max",
        (Arg((B, 9), axes=(NONE, TP)),),
        {"axis": "tp"},
        (
            Bad("must be sharded over it", (Arg((4, 6)),), {"axis": "tp"}),
            Bad("nothing partial", (Arg((4,), partial=TP),), {"axis": "tp"}),
            Bad("no dimension 2", (SPLIT,), {"axis": "tp", "dim": 2}),
            Bad("takes numbers", (Arg((6,), "bool", axes=(TP,)),), {"axis": "tp"}),
        ),
        (*FLOATS, "i32"),
        {"B": 3},
        "tp=2",
    ),
    Example("sharded_max", (Arg((5, 3), axes=(TP, NONE)),), {"axis": "tp", "dim": 0}, mesh="tp=4"),
]


def _ids(*shape: Any, dtype: str = "i32", axes: Any = ()) -> Arg:
    """Ids of a table of 13 rows, some out of range."""
    return Arg(shape, dtype, -2, 16, axes=axes)


TABLE = Arg((14, 5), axes=(TP, NONE))
CYCLIC = {"rows": 13, "parts": 2, "axis": "tp"}
SCATTERED = CYCLIC | {"scatter": 1, "capacity": 3, "queues": (1, 2)}
GATHERED = CYCLIC | {"capacity": 2, "queues": (2, 1)}
LOOKUPS = [
    Example(
        "cyclic_embedding",
        (_ids(B, 6), TABLE),
        CYCLIC,
        (
            Bad("i32 or i64", (Arg((3,)), TABLE), CYCLIC),
            Bad("are a table [14, width]", (_ids(3), Arg((13, 5), axes=(TP, NONE))), CYCLIC),
            Bad("are a table", (_ids(3), Arg((14,), axes=(TP,))), CYCLIC),
            Bad("are a table", (_ids(3), TABLE), CYCLIC | {"parts": 0}),
            Bad("must be sharded over it", (_ids(3), Arg((14, 5))), CYCLIC),
            Bad("must be sharded over it", (_ids(3), Arg((14, 5), axes=(NONE, TP))), CYCLIC),
            Bad("one dimension is sharded", (_ids(4, axes=(("dp", "tp"),)), TABLE), CYCLIC),
            Bad("one dimension is sharded", (Arg((3,), "i32", partial=TP), TABLE), CYCLIC),
            Bad("leave scatter out", (_ids(4, axes=(TP,)), TABLE), CYCLIC | {"scatter": 0}),
            Bad("no dimension 2", (_ids(4, 2), TABLE), CYCLIC | {"scatter": 2}),
            Bad("cannot be negative", (_ids(4), TABLE), CYCLIC | {"capacity": -1}),
            Bad("number of shards for each", (_ids(4), TABLE), CYCLIC | {"queues": (1, 2)}),
            Bad("number of shards for each", (_ids(4), TABLE), CYCLIC | {"queues": (0,)}),
        ),
        (*FLOATS, "i32"),
        {"B": 3},
        "tp=2",
    ),
    Example("cyclic_embedding", (_ids(5, 7, dtype="i64"), TABLE), SCATTERED, mesh="tp=2"),
    Example("cyclic_embedding", (_ids(6, 3, axes=(TP, NONE)), TABLE), GATHERED, mesh="tp=2"),
]

SLOTTED = _ids(4, 3, 2)
SLOTS = [
    Example(
        "slot_ids",
        (_ids(B, 3, 12),),
        {"sizes": (4, 9, 2)},
        (
            Bad("i32 or i64", (Arg((4, 3)),), {"sizes": (1, 2, 3)}),
            Bad("2 sizes for the slots of [4, 3, 2]", (SLOTTED,), {"sizes": (1, 2)}),
            Bad("no dimension 3", (SLOTTED,), {"sizes": (1, 2, 3), "dim": 3}),
            Bad("at least 1 row", (SLOTTED,), {"sizes": (1, 0, 3)}),
            Bad("no row 1", (SLOTTED,), {"sizes": (1, 2, 3), "outside": "row", "row": 1}),
            Bad("need ids in i64", (SLOTTED,), {"sizes": (2**30, 2**30, 2**30)}),
            Bad("zero, clamp", (SLOTTED,), {"sizes": (1, 2, 3), "outside": "wrap"}),
        ),
        ("f32",),
        {"B": 12},
    ),
    *(
        Example(
            "slot_ids",
            (_ids(12, 24, dtype="i64"),),
            {"sizes": (*range(3, 26), 40), "outside": outside, "row": 2, "dim": -1},
            (),
            ("f32",),
        )
        for outside in ("zero", "clamp", "row", "error")
    ),
    Example("slot_ids", (_ids(3, 12),), {"sizes": (7, 7, 7), "dim": 0}, (), ("f32",)),
]

EXAMPLES = [*FUSED, *SLICES, *CHOICES, *LOOKUPS, *SLOTS]
