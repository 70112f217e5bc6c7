"""Examples of operations on layout: reshape, transpose, slice, split, concat, repeat, pad."""

from __future__ import annotations

from irc.ir.dims import symbol
from tests.ops.example import FLOATS, Arg, Bad, Example

B, S = symbol("B"), symbol("S")
ANY = (*FLOATS, "i32", "bool")
X = (Arg((4, 6)),)


def _reshape() -> list[Example]:
    bad = (
        Bad("24 elements", X, {"shape": (5, 5)}),
        Bad("instead of the -1", X, {"shape": (4, -1)}),
        Bad("elements", (Arg((B, 6)),), {"shape": (S, 6)}),
        Bad("an integer", X, {"shape": (4.0, 6)}),
        Bad("a list", X, {"shape": 24}),
    )
    pairs = [
        *(((12, 5), (60,)), ((24, 5), (12, 2, 5)), ((2, 12, 4), (2, 48)), ((12, 4), (24, 2))),
        *(((3, 12, 8), (3, 12, 2, 4)), ((12, 1, 5), (1, 12, 5)), ((6, 4), (4, 6))),
        *(((5, 7), (7, 5)), ((1,), ()), ((), (1, 1)), ((0, 3), (3, 0)), ((12,), (12,))),
    ]
    symbolic = [
        *(((B, S, 24), (B, S, 12, 2)), ((B, S, 12, 2), (B * S, 24))),
        *(((B * S, 8), (B, S, 8)), ((B, 2 * S), (2 * B, S))),
    ]
    return [
        Example("reshape", X, {"shape": (24,)}, bad),
        *(Example("reshape", (Arg(a),), {"shape": b}, dtypes=ANY) for a, b in pairs),
        *(
            Example("reshape", (Arg(a),), {"shape": b}, sizes={"B": 12, "S": 6})
            for a, b in symbolic
        ),
    ]


def _transpose() -> list[Example]:
    bad = (
        Bad("entries", X, {"order": (0,)}),
        Bad("twice", X, {"order": (1, 1)}),
        Bad("no dimension 2", X, {"order": (0, 2)}),
        Bad("twice", X, {"order": (1, -1)}),
    )
    return [
        Example("transpose", (Arg((B, 12, 7)),), {"order": (2, 0, 1)}, bad, ANY, sizes={"B": 12}),
        Example("transpose", (Arg((2, 12, 3, 24)),), {"order": (0, -2, 1, -1)}),
        Example("transpose", (Arg(()),), {"order": ()}),
    ]


def _expand() -> list[Example]:
    bad = (
        Bad("does not stretch", X, {"shape": (4, 7)}),
        Bad("does not stretch", X, {"shape": (6,)}),
        Bad("does not stretch", (Arg((B, 6)),), {"shape": (S, 6)}),
    )
    return [
        Example("expand", (Arg((12, 1)),), {"shape": (3, 12, 8)}, bad, ANY),
        Example("expand", (Arg((1, 12)),), {"shape": (1, 12)}),
        Example("expand", (Arg((B, 1, 4)),), {"shape": (B, 3 * B, 4)}, sizes={"B": 12}),
        Example("expand", (Arg(()),), {"shape": (2, 3)}),
    ]


def _squeeze() -> list[Example]:
    one = (Arg((12, 1, 6, 1)),)
    gone = (
        Bad("is not 1", one, {"dims": (0,)}),
        Bad("names no dimension", one, {"dims": ()}),
        Bad("twice", one, {"dims": (1, -3)}),
        Bad("no dimension 4", one, {"dims": (4,)}),
    )
    new = (
        Bad("no dimension 3", X, {"dims": (3,)}),
        Bad("twice", X, {"dims": (0, 0)}),
        Bad("names no dimension", X, {"dims": ()}),
    )
    return [
        Example("squeeze", one, {"dims": (1, -1)}, gone, ANY),
        Example("squeeze", (Arg((1, B)),), {"dims": (0,)}, sizes={"B": 12}),
        Example("squeeze", (Arg((1,)),), {"dims": (0,)}),
        Example("unsqueeze", (Arg((12, 5)),), {"dims": (-1, 0)}, new, ANY),
        Example("unsqueeze", (Arg((B, 8)),), {"dims": (1,)}, sizes={"B": 12}),
        Example("unsqueeze", (Arg(()),), {"dims": (0, 1)}),
    ]


def _slice() -> list[Example]:
    bad = (
        Bad("beyond", X, {"dim": 0, "start": 1, "stop": 5}),
        Bad("beyond", X, {"dim": 0, "start": 3, "stop": 2}),
        Bad("beyond", X, {"dim": 1, "start": -1, "stop": 2}),
        Bad("positive", X, {"dim": 0, "start": 0, "stop": 4, "step": 0}),
        Bad("no dimension 2", X, {"dim": 2, "start": 0, "stop": 4}),
        Bad("multiple of 2", (Arg((B, 6)),), {"dim": 0, "start": 0, "stop": B, "step": 2}),
    )
    evens = {"dim": 1, "start": 0, "stop": 2 * S, "step": 2}
    return [
        Example("slice", (Arg((12, 9)),), {"dim": 1, "start": 2, "stop": 7}, bad, ANY),
        Example("slice", (Arg((11, 24)),), {"dim": 0, "start": 1, "stop": 11, "step": 3}),
        Example("slice", (Arg((3, 12)),), {"dim": -2, "start": 2, "stop": 2}),
        Example("slice", (Arg((12, S)),), {"dim": -1, "start": S - 1, "stop": S}, sizes={"S": 5}),
        Example("slice", (Arg((12, 2 * S)),), evens, sizes={"S": 3}),
    ]


def _split() -> list[Example]:
    bad = (
        Bad("add up", X, {"dim": 1, "sizes": (2, 3)}),
        Bad("add up", X, {"dim": 1, "sizes": ()}),
        Bad("beyond", X, {"dim": 1, "sizes": (-1, 7)}),
        Bad("no dimension", X, {"dim": -3, "sizes": (4,)}),
    )
    return [
        Example("split", (Arg((12, 9)),), {"dim": 1, "sizes": (4, 0, 5)}, bad, ANY),
        Example("split", (Arg((5, 24, 12)),), {"dim": -3, "sizes": (5,)}),
        Example("split", (Arg((12, S)),), {"dim": 1, "sizes": (2, S - 2)}, sizes={"S": 7}),
    ]


def _concat() -> list[Example]:
    bad = (
        Bad("at least one", (), {"dim": 0}),
        Bad("differ in dimension 0 only", (*X, Arg((4, 5))), {"dim": 0}),
        Bad("differ in dimension 0 only", (*X, Arg((4,))), {"dim": 0}),
        Bad("cast one", (*X, Arg((4, 6), "i32")), {"dim": 0}),
        Bad("no dimension", X, {"dim": 2}),
    )
    stack = (
        Bad("at least one", (), {"dim": 0}),
        Bad("shapes", (*X, Arg((4, 5)))),
        Bad("cast one", (*X, Arg((4, 6), "i32"))),
        Bad("no dimension 3", (*X, *X), {"dim": 3}),
    )
    return [
        Example("concat", (Arg((12, 3)), Arg((12, 5)), Arg((12, 0))), {"dim": 1}, bad, ANY),
        Example("concat", (Arg((24, 12)),), {"dim": -2}),
        Example("concat", (Arg((B, 12)), Arg((2, 12))), {"dim": 0}, sizes={"B": 4}),
        Example("stack", (Arg((12, 24)),) * 3, {"dim": 1}, stack, ANY),
        Example("stack", (Arg((B, 3)),) * 2, {"dim": -1}, sizes={"B": 12}),
        Example("stack", (Arg(()), Arg(()))),
    ]


def _layout() -> list[Example]:
    flip = (Bad("names no dimension", X, {"dims": ()}), Bad("no dimension", X, {"dims": (2,)}))
    repeat = (
        Bad("at least 1", X, {"dim": 0, "count": 0}),
        Bad("no dimension", X, {"dim": 2, "count": 2}),
    )
    pad = (
        Bad("2 entries", X, {"before": (1,), "after": (1, 1)}),
        Bad("beyond", X, {"before": (1, -1), "after": (1, 1)}),
        Bad("not an integer", (Arg((4,), "i32"),), {"before": (1,), "after": (1,), "value": 0.5}),
    )
    ends = {"before": (0, 2, 0), "after": (0, 0, 3)}
    symbolic = {"before": (0, 1), "after": (B, 0), "value": -1.5}
    return [
        Example("flip", (Arg((12, 5)),), {"dims": (1,)}, flip, ANY),
        Example("flip", (Arg((B, 5, 24)),), {"dims": (0, -2)}, sizes={"B": 4}),
        Example("repeat", (Arg((12, 5)),), {"dim": 0, "count": 3}, repeat, ANY),
        Example("repeat", (Arg((2, B, 12)),), {"dim": -2, "count": 2}, sizes={"B": 12}),
        Example("pad", (Arg((12, 5, 4)),), ends, pad, FLOATS),
        Example("pad", (Arg((B, 3)),), symbolic, sizes={"B": 4}),
        Example("pad", (Arg((12,), "i32"),), {"before": (0,), "after": (0,), "value": 7}),
        Example("pad", (Arg(()),), {"before": (), "after": ()}),
    ]


EXAMPLES = [
    *(*_reshape(), *_transpose(), *_expand(), *_squeeze()),
    *(*_slice(), *_split(), *_concat(), *_layout()),
]
