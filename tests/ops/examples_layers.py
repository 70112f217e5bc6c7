"""Examples of norms, rope, attention, feed-forwards and collectives for the generic test."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.ir.dims import Shape, symbol
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
    Example(
        "add_rms_norm",
        (ROWS, ROWS, Arg((16,))),
        {"eps": 1e-5, "offset": 1.0},
        sizes=SIZES,
        bad=(
            Bad("but x", (Arg((2, 16)), Arg((16,)), Arg((16,)))),
            Bad("the 16 features of x", (Arg((2, 16)), Arg((2, 16)), Arg((15,)))),
        ),
    ),
    Example(
        "add_layer_norm",
        (ROWS, ROWS, Arg((16,), name="weight"), Arg((16,), name="bias")),
        sizes=SIZES,
        bad=(Bad("but x", (Arg((16,)), Arg((2, 16)))),),
    ),
    Example("add_layer_norm", (Arg((3, 8)), Arg((3, 8))), {"eps": 1e-3}),
    Example("layer_norm", (Arg((3, 8)), Arg((8,), name="bias")), {"eps": 0.1}),
    Example("rms_norm", (Arg((3, 8)), Arg((8,))), {"eps": 0.1}),
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
    Example("group_norm", (Arg((2, 4)), Arg((4,), name="weight")), {"groups": 1, "eps": 0.1}),
]


def _image(*shape: int) -> tuple[Arg, ...]:
    return Arg((2, 4, 5, 7)), Arg((6, *shape))


CONVOLUTIONS = [
    Example(
        "conv",
        (Arg((B, 4, S)), Arg((6, 4, 3)), Arg((6,), name="bias")),
        {"before": (2,), "after": (1,)},
        sizes={"B": 2, "S": 5},
        bad=(
            Bad("x [batch, channels, positions...]", (Arg((2, 4)), Arg((6, 4)))),
            Bad("cannot make 4 groups of 6", _image(1, 3, 3), {"groups": 4}),
            Bad("has 4 channels", _image(2, 3, 3)),
            Bad("expected [6]", (*_image(4, 3, 3), Arg((5,), name="bias"))),
            Bad("before is [1]", _image(4, 3, 3), {"before": (1,)}),
            Bad("strides is [1, 0]", _image(4, 3, 3), {"strides": (1, 0)}),
            Bad("in 5 elements", _image(4, 6, 3)),
            Bad("its positions need sizes", (Arg((2, 4, 5)), Arg((6, 4, S)))),
            Bad("multiple of the stride 2", (Arg((2, 4, S)), Arg((6, 4, 3))), {"strides": (2,)}),
            Bad("takes floating-point", (Arg((2, 4, 5), "i32"), Arg((6, 4, 3), "i32"))),
        ),
    ),
    Example("conv", _image(4, 3, 2), {"strides": (2, 1), "dilations": (1, 3), "after": (1, 0)}),
    Example("conv", _image(2, 2, 2), {"groups": 2}),
    Example("conv", (Arg((2, 4, 5)), Arg((4, 1, 3)), Arg((4,), name="bias")), {"groups": 4}),
    Example("conv", (Arg((2, 2, 2 * S + 1)), Arg((3, 2, 4))), {"strides": (2,)}, sizes={"S": 3}),
]

_LONG = {"original_positions": 16, "factor": 4.0}


def _rope(*bad: Bad, index: str = "i32", **attributes: Any) -> Example:
    args = (ROWS, Arg((B, S), index, draw=_positions))
    return Example("rope", args, {"head_dim": 8} | attributes, bad, sizes=SIZES)


def _bad_rope(
    message: str, x: Shape = (2, 3, 16), at: Shape = (2, 3), index: str = "i32", **attributes: Any
) -> Bad:
    return Bad(message, (Arg(x), Arg(at, index)), {"head_dim": 8, **_LONG} | attributes)


_FACTORS = {"short_factors": (1.0, 1.1, 1.2, 1.3), "long_factors": (1.0, 2.0, 4.0, 8.0)}
ROPES = [
    _rope(
        _bad_rope("heads*6", head_dim=6),
        _bad_rope("must be even", (2, 3, 14), head_dim=7),
        _bad_rope("must be even", rotary_dim=10),
        _bad_rope("batch and tokens", at=(3, 2)),
        _bad_rope("indices in i32", index="f32"),
        *(_bad_rope("theta", theta=number) for number in (1.0, float("nan"), float("inf"))),
        _bad_rope("factor", kind="dynamic", factor=1e300),
        _bad_rope("beta_slow", kind="yarn", beta_slow=1e-320),
        _bad_rope("beta_fast", kind="yarn", beta_fast=1e308),
        _bad_rope("mscale", kind="yarn", mscale_all_dim=-10.0, mscale=1.0),
        _bad_rope("low_freq_factor", kind="llama3", low_freq_factor=0.0),
        _bad_rope("attention_factor", kind="yarn", attention_factor=float("inf")),
        _bad_rope("of a pair", kind="longrope", short_factors=(0.0,) * 4),
        _bad_rope("factor", kind="linear", factor=0.0),
        _bad_rope("needs original_positions", kind="yarn", original_positions=0),
        _bad_rope("factor of at least 1", kind="dynamic", factor=0.5),
        _bad_rope("rotary_dim of at least 4", kind="dynamic", rotary_dim=2),
        _bad_rope("low_freq_factor <= high_freq_factor", kind="llama3", low_freq_factor=5.0),
        _bad_rope("beta_slow <= beta_fast", kind="yarn", beta_fast=0.5),
        _bad_rope("4 short_factors", kind="longrope", short_factors=(1.0,)),
        _bad_rope("kind is one of", kind="dinamic"),
    ),
    _rope(interleaved=True),
    _rope(rotary_dim=4),
    _rope(rotary_dim=4, interleaved=True, theta=500.0),
    _rope(index="i64", kind="linear", factor=2.0),
    *(_rope(kind=kind, **_LONG) for kind in ("dynamic", "llama3", "yarn")),
    _rope(kind="longrope", **_FACTORS, **_LONG),
    _rope(kind="proportional", rotary_dim=4, factor=2.0),
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
            _bad("not heads of 0", BAD_Q, BAD_K, BAD_K, head_dim=0),
            _bad("takes q [batch", Arg((3, 16)), BAD_K, BAD_K),
            _bad("cannot share 3", BAD_Q, Arg((2, 5, 12)), Arg((2, 5, 12))),
            _bad("heads, 4 to each", BAD_Q, BAD_K, BAD_K, group=4),
            _bad("must have equal keys", BAD_Q, BAD_K, Arg((2, 4, 8))),
            _bad("or both caches", BAD_Q, BAD_K, Arg((2, 2, 5, 4))),
            _bad("not caches of equal heads", BAD_Q, Arg((2, 2, 5, 4)), Arg((2, 2, 6, 4))),
            _bad("the batches differ", BAD_Q, Arg((1, 5, 8)), Arg((1, 5, 8))),
            _bad("cannot be negative", BAD_Q, BAD_K, BAD_K, window=-1),
            _bad("f32 and bf16", Arg((2, 3, 16), "f32"), *[Arg(BAD_K.shape, "bf16")] * 2),
            _bad("one number per row", BAD_Q, BAD_K, BAD_K, Arg((3,), "i32", name="past")),
            _bad("one number per row", BAD_Q, BAD_K, BAD_K, Arg((3,), "i32", name="lengths")),
            _bad("indices in i32", BAD_Q, BAD_K, BAD_K, Arg((2,), "f32", name="past")),
            _bad("takes bool", BAD_Q, BAD_K, BAD_K, Arg((2, 4, 3, 5), "f32", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 4, 3, 1), "bool", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 3, 5), "bool", name="mask")),
            _bad("does not fit", BAD_Q, BAD_K, BAD_K, Arg((2, 2, 3, 5), name="bias")),
            _bad("there are 4 query heads", BAD_Q, BAD_K, BAD_K, Arg((2,), name="sinks")),
        )
    ),
    _attention(causal=True),
    Example("attention", (Arg((2, 5, 16)), *[Arg((2, 3, 8))] * 2), HEADS | {"causal": True}),
    Example("attention", (Arg((2, 5, 16)), *[Arg((2, 5, 8))] * 2), HEADS | {"causal": True}),
    _attention(causal=True, window=1),
    _attention(Arg((B, 4, S, T), name="bias"), softcap=0.7),
    _attention(causal=True, window=2),
    _attention(window=2),
    _attention(scale=0.3, softcap=2.0),
    _attention(LENGTHS),
    _attention(PAST, keys=CACHE, causal=True),
    _attention(PAST, LENGTHS, keys=CACHE, causal=True, window=3),
    _attention(Arg((B, 4, S, T), name="bias"), Arg((1, 1, S, T), "bool", name="mask")),
    _attention(Arg((1, 4, 1, T), "f32", name="bias"), causal=True),
    _attention(Arg((B, 1, 1, T), "bool", name="mask"), keys=CACHE),
    _attention(Arg((4,), name="sinks"), causal=True, window=2),
    _attention(PAST, LENGTHS, Arg((4,), "f32", name="sinks"), keys=CACHE, causal=True, softcap=3.0),
    _attention(Arg((1, 1, S, T), "bool", name="mask"), Arg((4,), name="sinks"), keys=CACHE),
    _attention(keys=Arg((B, T, 16)), group=1),
    _attention(keys=Arg((B, T, 4))),
    _attention(keys=Arg((B, 1, T, 4))),
    Example("attention", (Q, K, Arg((B, T, 6))), HEADS, sizes=KEYS),
    Example("attention", (Q, CACHE, Arg((B, 2, T, 3))), HEADS | {"causal": True}, sizes=KEYS),
]


def _bad_update(message: str, *shapes: Shape, dtypes: tuple[str, str] = ("T", "T")) -> Bad:
    cache, new, past = shapes
    return Bad(message, (Arg(cache, dtypes[0]), Arg(new, dtypes[1]), Arg(past, "i32")))


def _pages(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Pages of a pool of 40, each of one row."""
    return rng.permutation(40)[: np.prod(shape)].reshape(shape)


def _some_pages(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return np.where(rng.integers(0, 3, shape) > 0, _pages(rng, shape), -1)


POOL, PAGES = Arg((40, 2, 3, 4)), Arg((B, 3), "i32", draw=_pages, name="pages")
SOME_PAGES = Arg((B, 3), "i32", draw=_some_pages, name="pages")
BAD_PAGES = Arg((2, 3), "f32", name="pages"), Arg((2,), "i32", name="pages")

UPDATES = [
    Example(
        "cache_update",
        (POOL, Arg((B, S, 8)), Arg((B,), "i32", low=0, high=7), SOME_PAGES),
        {},
        (
            *(
                Bad(message, (Arg((40, 2, 3, 4)), Arg((2, 3, 8)), Arg((2,), "i32"), pages))
                for message, pages in zip(
                    ("indices in i32", "expected [batch, pages of a row]"), BAD_PAGES, strict=True
                )
            ),
            Bad(
                "takes [3, tokens, 8]",
                (POOL, Arg((2, 3, 8)), Arg((2,), "i32"), Arg((3, 3), "i32", name="pages")),
            ),
        ),
        sizes=SIZES,
    ),
    Example(
        "gather_pages",
        (POOL, Arg((B, 3), "i32", draw=_some_pages)),
        {},
        (
            Bad("takes a pool", (Arg((8, 2, 3)), Arg((2, 3), "i32"))),
            Bad("expected [batch, pages of a row]", (Arg((40, 2, 3, 4)), Arg((2,), "i32"))),
        ),
        sizes=SIZES,
    ),
    Example(
        "cache_update",
        (Arg((B, 2, 8, 4)), Arg((B, S, 8)), Arg((B,), "i32", low=0, high=6)),
        {},
        (
            _bad_update("takes a cache", (2, 2, 8), (2, 3, 8), (2,)),
            _bad_update("takes [2, tokens, 8]", (2, 2, 8, 4), (2, 3, 6), (2,)),
            _bad_update("one number per row", (2, 2, 8, 4), (2, 3, 8), (1,)),
            _bad_update("f32 and bf16", (2, 2, 8, 4), (2, 3, 8), (2,), dtypes=("f32", "bf16")),
        ),
        sizes=SIZES,
    ),
]

POSITIONS = Arg((B, S), "i32", draw=_positions, name="positions")
GAINS = (Arg((4,), name="q_norm"), Arg((4,), name="k_norm"))


def _fused(
    *more: Arg,
    op: str = "fused_attention",
    bad: tuple[Bad, ...] = (),
    cache: Arg = CACHE,
    **attributes: Any,
) -> Example:
    new, past = Arg((B, S, 8)), Arg((B,), "i32", low=0, high=3)
    args = (Q, new, new, cache, cache, past, *more)
    return Example(op, args, HEADS | attributes, bad=bad, sizes=KEYS)


def _bad_fused(message: str, *more: Arg, q: Shape = (2, 3, 16), **attributes: Any) -> Bad:
    new, cache = Arg((2, 3, 8)), Arg((2, 2, 5, 4))
    args = (Arg(q), new, new, cache, cache, Arg((2,), "i32"), *more)
    return Bad(message, args, HEADS | attributes)


FUSED = [
    _fused(
        causal=True,
        bad=(
            _bad_fused("must be the same tokens", q=(2, 2, 16)),
            _bad_fused("there are 4 query heads", Arg((2,), name="sinks")),
        ),
    ),
    _fused(
        POSITIONS,
        op="rope_and_cache",
        interleaved=True,
        bad=(
            _bad_fused("q_norm and k_norm, or neither", Arg((4,), name="q_norm")),
            _bad_fused("depend on the length", kind="dynamic", original_positions=8),
            _bad_fused("has no heads of 0 features", *GAINS, head_dim=0),
            _bad_fused("positions is", Arg((2, 2), "i32", name="positions")),
        ),
    ),
    _fused(POSITIONS, causal=True, rotary_dim=2, window=2),
    _fused(*GAINS, causal=True, offset=1.0, softcap=2.0),
    _fused(POSITIONS, *GAINS, LENGTHS, Arg((4,), "f32", name="sinks"), causal=True),
    _fused(POSITIONS, PAGES, op="rope_and_cache", cache=POOL),
    _fused(*GAINS, PAGES, LENGTHS, cache=POOL, causal=True),
    _fused(PAGES, Arg((B, 1, S, 9), "f32", name="bias"), cache=POOL, causal=True),
    _fused(Arg((B, 1, S, T), "f32", name="bias"), Arg((1, 4, S, T), "bool", name="mask"), eps=1e-5),
]

GATE = (ROWS, Arg((6, 16)), Arg((6, 16)))
BIASES = (Arg((6,), name="gate_bias"), Arg((6,), name="up_bias"))
BAD_GATES = (
    Bad("both are [N, K]", (Arg((2, 16)), Arg((6, 16)), Arg((5, 16)))),
    Bad("both are [N, K]", (Arg((2, 16)), Arg((1, 16)), Arg((6, 16)))),
    Bad("takes 15 inputs", (Arg((2, 16)), Arg((6, 15)), Arg((6, 15)))),
    Bad("act is one of", (Arg((2, 16)), Arg((6, 16)), Arg((6, 16))), {"act": "swish"}),
)
MLPS = [
    Example("gated_mlp", GATE, {}, BAD_GATES, sizes=SIZES),
    Example("gated_mlp", (*GATE, *BIASES), {"act": "gelu"}, sizes=SIZES),
    Example("gated_mlp", (*GATE, BIASES[1]), {"act": "gelu_tanh"}, sizes=SIZES),
    *(
        Example("gated_mlp", GATE, {"act": act}, sizes=SIZES)
        for act in ("quick_gelu", "relu", "squared_relu", "sigmoid")
    ),
]

NORM, RESIDUAL = Arg((16,), name="norm"), Arg((B, S, 6), name="residual")
GATED = (GATE[0], GATE[1], Arg((6, 16), name="gate"))
FUSED_LINEARS = [
    Example(
        "fused_linear",
        (*GATE[:2], Arg((6,), name="bias"), NORM, RESIDUAL),
        {"eps": 1e-5, "offset": 1.0, "act": "relu"},
        (
            Bad("takes 15 inputs", (Arg((2, 16)), Arg((6, 15)))),
            Bad("but the product", (Arg((2, 16)), Arg((6, 16)), Arg((6,), name="residual"))),
            Bad("the 16 features of x", (Arg((2, 16)), Arg((6, 16)), Arg((6,), name="norm"))),
            Bad("needs an act", (Arg((2, 16)), Arg((6, 16)), Arg((6, 16), name="gate"))),
            Bad("but no gate", (Arg((2, 16)), Arg((6, 16)), Arg((6,), name="gate_bias"))),
            Bad("act is one of", (Arg((2, 16)), Arg((6, 16))), {"act": "swish"}),
        ),
        sizes=SIZES,
    ),
    Example(
        "fused_linear",
        (*GATED[:2], Arg((6,), name="bias"), GATED[2], BIASES[0], NORM, RESIDUAL),
        {"act": "silu"},
        sizes=SIZES,
    ),
    Example("fused_linear", GATED, {"act": "gelu_tanh"}, sizes=SIZES),
]

SUM = {"partial": ("tp",)}
TP = {"axis": "tp"}


def _collectives(
    op: str, operand: Arg, bad: Bad, local: tuple[int, ...] = (4, 6), **attributes: Any
) -> list[Example]:
    """The global form over an operand of that type, and the local one over a group of two."""
    own = TP | attributes
    away = Bad("not a mesh axis", (operand,), own | {"axis": "t p"})
    group_size = Bad("is for the local view", (operand,), own | {"group_size": 2})
    refused = (bad, away, group_size) if operand.axes or operand.partial else (bad, away)
    return [
        Example(op, (operand,), own, mesh="tp=2", bad=refused),
        Example(op, (Arg(local),), own | {"group_size": 2}, mesh="tp=2", local=True),
    ]


PLAIN = Arg((4, 6))
SUMMED = Arg((4, 6), **SUM)  # pyright: ignore[reportArgumentType]
ROWS_SPLIT = Arg((4, 6), axes=(("tp",), ()))
NOT_PARTIAL = Bad("is not a partial sum over it", (PLAIN,), TP)
NOT_SHARDED = Bad("is not sharded over it", (PLAIN,), TP | {"dim": 0})
UNEVEN = Bad("in 4 equal shards", (PLAIN,), TP | {"dim": 1, "group_size": 4})
SAME = Bad("split and concat are both", (ROWS_SPLIT,), TP | {"split": 0, "concat": 0})
NOT_WHOLE = Bad("must be replicated on the root", (SUMMED,), TP)
MAXIMUM = Bad("not max", (SUMMED,), TP | {"op": "max"})
NO_DIM = Bad("no dimension 2", (ROWS_SPLIT,), TP | {"dim": 2})
NO_ROOT = Bad("no rank 2 in a group of 2", (PLAIN,), TP | {"dim": 0, "root": 2, "group_size": 2})
COLLECTIVES = [
    *_collectives("all_reduce", SUMMED, NOT_PARTIAL),
    Example("all_reduce", (PLAIN,), TP | {"op": "max", "group_size": 2}, mesh="tp=2", local=True),
    *_collectives("all_gather", ROWS_SPLIT, NOT_SHARDED, dim=0),
    *_collectives("reduce_scatter", SUMMED, UNEVEN, dim=1),
    *_collectives("all_to_all", ROWS_SPLIT, SAME, split=1, concat=0),
    *_collectives("broadcast", PLAIN, NOT_WHOLE, root=1),
    *_collectives("reduce", SUMMED, MAXIMUM, root=1),
    *_collectives("collective_gather", ROWS_SPLIT, NO_DIM, dim=0, root=1),
    *_collectives("collective_scatter", PLAIN, NO_ROOT, dim=0, root=1),
    Example(
        "rank", (), TP, mesh="tp=2", local=True, bad=(Bad("not a mesh axis", (), {"axis": ""}),)
    ),
]

EXAMPLES = [
    *(*NORMS, *CONVOLUTIONS, *ROPES, *ATTENTIONS, *UPDATES, *FUSED),
    *(*MLPS, *FUSED_LINEARS, *COLLECTIVES),
]
