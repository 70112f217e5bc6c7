"""Examples of norms, rope, attention, feed-forwards and collectives for the generic test."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.dims import symbol
from tests.ops.example import Arg, Bad, Example

B, S, T = symbol("B"), symbol("S"), symbol("T")
SIZES = {"B": 2, "S": 3}
ROWS = Arg((B, S, 16))


def _positions(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 40, shape)


NORMS = [
    Example(
        "rms_norm",
        (ROWS, Arg((16,))),
        {"eps": 1e-5},
        sizes=SIZES,
        bad=(
            Bad("must have the 16 features of x", (Arg((2, 16)), Arg((15,)))),
            Bad("takes floating-point operands", (Arg((2, 16), "i32"), Arg((16,)))),
            Bad("at least one dimension", (Arg(()), Arg((16,)))),
        ),
    ),
    Example("rms_norm", (Arg((4, 8)), Arg((8,), "f32")), {"offset": 1.0}),
    Example(
        "layer_norm",
        (ROWS, Arg((16,), name="weight"), Arg((16,), name="bias")),
        sizes=SIZES,
        bad=(
            Bad("weight is f32[8]", (Arg((2, 16)), Arg((8,), "f32", name="weight"))),
            Bad("bias is f32[8]", (Arg((2, 16)), Arg((8,), "f32", name="bias"))),
        ),
    ),
    Example("layer_norm", (Arg((3, 8)),), {"eps": 1e-3}),
    Example("layer_norm", (Arg((3, 8)), Arg((8,), name="bias"))),
    Example(
        "group_norm",
        (Arg((B, 6, S)), Arg((6,), name="weight"), Arg((6,), name="bias")),
        {"groups": 3},
        sizes={"B": 2, "S": 5},
        bad=(
            Bad("cannot make 4 groups of 6", (Arg((2, 6, 3)),), {"groups": 4}),
            Bad("cannot make 0 groups of 6", (Arg((2, 6, 3)),), {"groups": 0}),
            Bad("takes [batch, channels, ...]", (Arg((6,)),), {"groups": 3}),
        ),
    ),
    Example("group_norm", (Arg((2, 4, 3, 5)),), {"groups": 2}),
    Example("group_norm", (Arg((2, 4)), Arg((4,), name="weight")), {"groups": 1}),
]

POSITIONS = Arg((B, S), "i32", draw=_positions)
_LONG = {"original_positions": 16, "factor": 4.0}
ROPES = [
    Example(
        "rope",
        (ROWS, POSITIONS),
        {"head_dim": 8},
        sizes=SIZES,
        bad=(
            Bad("heads*6", (Arg((2, 3, 16)), Arg((2, 3), "i32")), {"head_dim": 6}),
            Bad("must be even", (Arg((2, 3, 14)), Arg((2, 3), "i32")), {"head_dim": 7}),
            Bad(
                "must be even",
                (Arg((2, 3, 16)), Arg((2, 3), "i32")),
                {"head_dim": 8, "rotary_dim": 10},
            ),
            Bad("batch and tokens", (Arg((2, 3, 16)), Arg((3, 2), "i32")), {"head_dim": 8}),
            Bad("indices in i32", (Arg((2, 3, 16)), Arg((2, 3), "f32")), {"head_dim": 8}),
            *(
                Bad(
                    message,
                    (Arg((2, 3, 16)), Arg((2, 3), "i32")),
                    {"head_dim": 8, "original_positions": 16, **attributes},
                )
                for message, attributes in (
                    ("theta", {"theta": 1.0}),
                    ("theta", {"theta": float("nan")}),
                    ("theta", {"theta": float("inf")}),
                    ("factor", {"kind": "dynamic", "factor": 1e300}),
                    ("beta_slow", {"kind": "yarn", "beta_slow": 1e-320}),
                    ("beta_fast", {"kind": "yarn", "beta_fast": 1e308}),
                    ("mscale", {"kind": "yarn", "mscale_all_dim": -10.0, "mscale": 1.0}),
                    ("low_freq_factor", {"kind": "llama3", "low_freq_factor": 0.0}),
                    ("attention_factor", {"kind": "yarn", "attention_factor": float("inf")}),
                    ("of a pair", {"kind": "longrope", "short_factors": (0.0,) * 4}),
                    ("factor", {"kind": "linear", "factor": 0.0}),
                    ("needs original_positions", {"kind": "yarn", "original_positions": 0}),
                    ("factor of at least 1", {"kind": "dynamic", "factor": 0.5}),
                    ("rotary_dim of at least 4", {"kind": "dynamic", "rotary_dim": 2}),
                    (
                        "low_freq_factor < high_freq_factor",
                        {"kind": "llama3", "low_freq_factor": 5.0},
                    ),
                    ("beta_slow <= beta_fast", {"kind": "yarn", "beta_fast": 0.5}),
                    ("4 short_factors", {"kind": "longrope", "short_factors": (1.0,)}),
                    ("kind is one of", {"kind": "dinamic"}),
                )
            ),
        ),
    ),
    Example("rope", (ROWS, POSITIONS), {"head_dim": 8, "interleaved": True}, sizes=SIZES),
    Example("rope", (ROWS, POSITIONS), {"head_dim": 8, "rotary_dim": 4}, sizes=SIZES),
    Example(
        "rope",
        (ROWS, POSITIONS),
        {"head_dim": 8, "rotary_dim": 4, "interleaved": True, "theta": 500.0},
        sizes=SIZES,
    ),
    Example(
        "rope",
        (ROWS, Arg((B, S), "i64", draw=_positions)),
        {"head_dim": 8, "kind": "linear", "factor": 2.0},
        sizes=SIZES,
    ),
    Example("rope", (ROWS, POSITIONS), {"head_dim": 8, "kind": "dynamic", **_LONG}, sizes=SIZES),
    Example("rope", (ROWS, POSITIONS), {"head_dim": 8, "kind": "llama3", **_LONG}, sizes=SIZES),
    Example("rope", (ROWS, POSITIONS), {"head_dim": 8, "kind": "yarn", **_LONG}, sizes=SIZES),
    Example(
        "rope",
        (ROWS, POSITIONS),
        {
            "head_dim": 8,
            "kind": "longrope",
            "short_factors": (1.0, 1.1, 1.2, 1.3),
            "long_factors": (1.0, 2.0, 4.0, 8.0),
            **_LONG,
        },
        sizes=SIZES,
    ),
]

HEADS = {"head_dim": 4}
Q, K = Arg((B, S, 16)), Arg((B, T, 8))
CACHE = Arg((B, 2, T, 4))
KEYS = {"B": 2, "S": 3, "T": 5}
PAST = Arg((B,), "i32", low=0, high=3, name="past")
LENGTHS = Arg((B,), "i32", low=0, high=6, name="lengths")
BAD_Q = Arg((2, 3, 16))
BAD_K = Arg((2, 5, 8))


def _attention(*more: Arg, keys: Arg = K, bad: tuple[Bad, ...] = (), **attributes: Any) -> Example:
    args = (Q, keys, keys, *more)
    return Example("attention", args, HEADS | attributes, sizes=KEYS, bad=bad)


def _bad(message: str, *args: Arg, **attributes: Any) -> Bad:
    return Bad(message, args, HEADS | attributes)


ATTENTIONS = [
    _attention(
        bad=(
            _bad("the 18 features of q", Arg((2, 3, 18)), BAD_K, BAD_K),
            _bad("the 6 features of k", BAD_Q, Arg((2, 5, 6)), Arg((2, 5, 6))),
            _bad("no heads of 0", BAD_Q, BAD_K, BAD_K, head_dim=0),
            _bad("takes q [batch", Arg((3, 16)), BAD_K, BAD_K),
            _bad("cannot share 3", BAD_Q, Arg((2, 5, 12)), Arg((2, 5, 12))),
            _bad("heads, 4 to each", BAD_Q, BAD_K, BAD_K, group=4),
            _bad("must have equal keys", BAD_Q, BAD_K, Arg((2, 4, 8))),
            _bad("or both caches", BAD_Q, BAD_K, Arg((2, 2, 5, 4))),
            _bad("no caches of equal heads", BAD_Q, Arg((2, 2, 5, 4)), Arg((2, 2, 6, 4))),
            _bad("the batches differ", BAD_Q, Arg((1, 5, 8)), Arg((1, 5, 8))),
            _bad("cannot be negative", BAD_Q, BAD_K, BAD_K, window=-1),
            _bad(
                "the operands are f32 and bf16",
                Arg((2, 3, 16), "f32"),
                *[Arg(BAD_K.shape, "bf16")] * 2,
            ),
            _bad("one number per row", BAD_Q, BAD_K, BAD_K, Arg((3,), "i32", name="past")),
            _bad("one number per row", BAD_Q, BAD_K, BAD_K, Arg((3,), "i32", name="lengths")),
            _bad("indices in i32", BAD_Q, BAD_K, BAD_K, Arg((2,), "f32", name="past")),
            _bad("takes bool", BAD_Q, BAD_K, BAD_K, Arg((2, 4, 3, 5), "f32", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 4, 3, 1), "bool", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 3, 5), "bool", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 2, 3, 5), name="bias")),
        )
    ),
    _attention(causal=True),
    _attention(causal=True, window=2),
    _attention(window=2),
    _attention(scale=0.3, softcap=2.0),
    _attention(LENGTHS),
    _attention(PAST, keys=CACHE, causal=True),
    _attention(PAST, LENGTHS, keys=CACHE, causal=True, window=3),
    _attention(Arg((B, 4, S, T), name="bias"), Arg((1, 1, S, T), "bool", name="mask")),
    _attention(Arg((1, 4, 1, T), "f32", name="bias"), causal=True),
    _attention(Arg((B, 1, 1, T), "bool", name="mask"), keys=CACHE),
    _attention(keys=Arg((B, T, 16)), group=1),
    _attention(keys=Arg((B, T, 4))),
    _attention(keys=Arg((B, 1, T, 4))),
    Example("attention", (Q, K, Arg((B, T, 6))), HEADS, sizes=KEYS),
    Example("attention", (Q, CACHE, Arg((B, 2, T, 3))), HEADS | {"causal": True}, sizes=KEYS),
]

UPDATES = [
    Example(
        "cache_update",
        (Arg((B, 2, 8, 4)), Arg((B, S, 8)), Arg((B,), "i32", low=0, high=6)),
        sizes=SIZES,
        bad=(
            Bad("takes a cache", (Arg((2, 2, 8)), Arg((2, 3, 8)), Arg((2,), "i32"))),
            Bad("takes [2, tokens, 8]", (Arg((2, 2, 8, 4)), Arg((2, 3, 6)), Arg((2,), "i32"))),
            Bad("one number per row", (Arg((2, 2, 8, 4)), Arg((2, 3, 8)), Arg((1,), "i32"))),
            Bad(
                "the operands are f32 and bf16",
                (Arg((2, 2, 8, 4), "f32"), Arg((2, 3, 8), "bf16"), Arg((2,), "i32")),
            ),
        ),
    ),
]

GATE = (ROWS, Arg((6, 16)), Arg((6, 16)))
BIASES = (Arg((6,), name="gate_bias"), Arg((6,), name="up_bias"))
MLPS = [
    Example(
        "gated_mlp",
        GATE,
        sizes=SIZES,
        bad=(
            Bad("takes 15 inputs", (Arg((2, 16)), Arg((6, 15)), Arg((6, 16)))),
            Bad("do not broadcast", (Arg((2, 16)), Arg((6, 16)), Arg((5, 16)))),
            Bad("act is one of", (Arg((2, 16)), Arg((6, 16)), Arg((6, 16))), {"act": "swish"}),
        ),
    ),
    Example("gated_mlp", (*GATE, *BIASES), {"act": "gelu"}, sizes=SIZES),
    Example("gated_mlp", (*GATE, BIASES[1]), {"act": "gelu_tanh"}, sizes=SIZES),
    *(
        Example("gated_mlp", GATE, {"act": act}, sizes=SIZES)
        for act in ("quick_gelu", "relu", "squared_relu", "sigmoid")
    ),
]

SUM = {"partial": ("tp",)}
TP = {"axis": "tp"}


def _collectives(
    op: str, operand: Arg, bad: Bad, local: tuple[int, ...] = (4, 6), **attributes: Any
) -> list[Example]:
    """The global form over an operand of that type, and the local one over a group of two."""
    own = TP | attributes
    away = Bad("no mesh axis", (operand,), own | {"axis": "t p"})
    ways = Bad("is for the local view", (operand,), own | {"ways": 2})
    refused = (bad, away, ways) if operand.axes or operand.partial else (bad, away)
    return [
        Example(op, (operand,), own, mesh="tp=2", bad=refused),
        Example(op, (Arg(local),), own | {"ways": 2}, mesh="tp=2", local=True),
    ]


PLAIN = Arg((4, 6))
SUMMED = Arg((4, 6), **SUM)  # pyright: ignore[reportArgumentType]
ROWS_SPLIT = Arg((4, 6), axes=(("tp",), ()))
COLLECTIVES = [
    *_collectives("all_reduce", SUMMED, Bad("is not a partial sum over it", (PLAIN,), TP)),
    Example("all_reduce", (PLAIN,), TP | {"op": "max", "ways": 2}, mesh="tp=2", local=True),
    *_collectives(
        "all_gather", ROWS_SPLIT, Bad("is not split over it", (PLAIN,), TP | {"dim": 0}), dim=0
    ),
    *_collectives(
        "reduce_scatter",
        SUMMED,
        Bad("into 4 equal parts", (PLAIN,), TP | {"dim": 1, "ways": 4}),
        dim=1,
    ),
    *_collectives(
        "all_to_all",
        ROWS_SPLIT,
        Bad("split and concat are both", (ROWS_SPLIT,), TP | {"split": 0, "concat": 0}),
        split=1,
        concat=0,
    ),
    *_collectives("broadcast", PLAIN, Bad("must be whole on the root", (SUMMED,), TP), root=1),
    *_collectives("reduce", SUMMED, Bad("not max", (SUMMED,), TP | {"op": "max"}), root=1),
    *_collectives(
        "collective_gather",
        ROWS_SPLIT,
        Bad("no dimension 2", (ROWS_SPLIT,), TP | {"dim": 2}),
        dim=0,
        root=1,
    ),
    *_collectives(
        "collective_scatter",
        PLAIN,
        Bad("no rank 2 in a group of 2", (PLAIN,), TP | {"dim": 0, "root": 2, "ways": 2}),
        dim=0,
        root=1,
    ),
    Example("rank", (), TP, mesh="tp=2", local=True, bad=(Bad("no mesh axis", (), {"axis": ""}),)),
]

EXAMPLES = [*NORMS, *ROPES, *ATTENTIONS, *UPDATES, *MLPS, *COLLECTIVES]
