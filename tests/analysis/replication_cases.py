"""Changes of one small module: invalid ones with the error they must cause, and valid ones."""

from __future__ import annotations

MLP = """
module @m local mesh(dp=2, tp=2) dims(B=1:2:4) {
  weight @up : f32[8, 4] = random("up", 7, 0.5, [16, 4]).shard(0, tp)
  weight @down : f32[4, 8] = random("down", 7, 0.5, [4, 16]).shard(1, tp)
  weight @bias : f32[4] = random("bias", 7, 0.5)
  weight @table : f32[5, 4] = random("table", 7, 0.5, [10, 4]).shard(0, tp)
  func @forward(%x: f32[B, 4], %ids: i32[B], %k: f32[B, 2])
    -> (y: f32[B, 4], k: f32[B, 2] aliases %k) layouts(%k: f32[B, 4@tp]) {
    %h = linear %x, @up : f32[B, 8] loc("model.py":1 "mlp")
    %a = silu %h : f32[B, 8] loc("model.py":2 "mlp")
    %t = linear %a, @down : f32[B, 4] loc("model.py":3 "mlp")
    %s = all_reduce %t {axis="tp", group_size=2} : f32[B, 4] loc("model.py":4 "mlp")
    %y = add %x, %s : f32[B, 4] loc("model.py":5)
    %n = neg %k : f32[B, 2] loc("model.py":6)
    return %y, %n loc("model.py":7)
  }
}
"""
RANK = '%r = rank {axis="tp"} : i32[] loc("model.py":10)\n    '
FLOAT = '%f = cast %r {dtype="f32"} : f32[] loc("model.py":11)\n    '
MORE = '%m = linear %y, @up : f32[B, 8] loc("model.py":20)\n    '
MORE += '%o = linear %m, @down : f32[B, 4] loc("model.py":21)\n    '
AGAIN = '%g = linear %t, @wide : f32[B, 4] loc("model.py":12)\n    '
AGAIN += '%z = all_reduce %g {axis="tp", group_size=2} : f32[B, 4] loc("model.py":13)\n    '
WIDE = '  weight @wide : f32[4, 4] = random("wide", 7, 0.5, [4, 8]).shard(1, tp)\n'
LATE = '%p = all_reduce %o {axis="tp", group_size=2} : f32[B, 4] loc("model.py":22)\n    '


# (replacements in MLP, words of the Error in order, line the Error names)
CASES: dict[str, tuple[list[tuple[str, str]], list[str], int]] = {
    "lost all_reduce": (
        [("add %x, %s", "add %x, %t")],
        [
            "the result y of @forward may differ between the ranks of tp",
            "because the linear at model.py:3 in mlp uses @down, which is sharded over tp",
            "put an all_reduce over tp behind it",
        ],
        5,
    ),
    "lost all_gather": (
        [("return %y", "return %h"), ("(y: f32[B, 4]", "(y: f32[B, 8]")],
        ["the linear at model.py:1 in mlp uses @up", "put an all_gather over tp behind it"],
        1,
    ),
    "a split argument": (
        [("return %y", "return %k"), ("(y: f32[B, 4]", "(y: f32[B, 2]")],
        ["the result y", "because %k is sharded over tp: put an all_gather over tp behind %k"],
        7,
    ),
    "the rank index added": (
        [("%y = add %x, %s", f"{RANK}{FLOAT}%y = add %s, %f")],
        ["the rank at model.py:10 differs on every rank of tp"],
        5,
    ),
    "a scatter of a replicated value": (
        [
            (
                "return %y",
                '%z = collective_scatter %x {axis="dp", dim=1, group_size=2} : f32[B, 2]\n'
                "    return %z",
            ),
            ("(y: f32[B, 4]", "(y: f32[B, 2]"),
        ],
        ["ranks of dp", "the collective_scatter %z leaves something else on every rank of dp"],
        7,
    ),
    "a lookup": (
        [
            (
                "%y = add %x, %s",
                f'{RANK}%i = sub %ids, %r : i32[B] loc("model.py":12)\n    '
                '%e = embedding %i, @table : f32[B, 4] loc("model.py":13)\n    %y = add %s, %e',
            )
        ],
        [
            "the embedding at model.py:13 uses @table, which is sharded over tp",
            "an all_reduce over",
        ],
        5,
    ),
    "all_reduce after a nonlinear use": (
        [("add %x, %s", "add %x, %t"), ("return %y", f"{MORE}{LATE}return %p")],
        [
            "the all_reduce at model.py:22 has a wrong operand",
            "the add at model.py:5 takes as complete the partial sum over tp",
            "the linear at model.py:3 in mlp uses @down",
            "put an all_reduce over tp behind it",
        ],
        22,
    ),
    "rows of a partial sum": (
        [
            (
                "%y = add %x, %s",
                f'{RANK}%g = gather %t, %r {{dim=1}} : f32[B] loc("model.py":12)\n    '
                '%z = all_reduce %g {axis="tp", group_size=2} : f32[B] loc("model.py":13)\n'
                "    %y = add %x, %s",
            )
        ],
        ["the all_reduce at model.py:13 has a wrong operand", "the gather at model.py:12 takes"],
        13,
    ),
    "partial sums in another contraction": (
        [("%y = add %x, %s", f"{AGAIN}%y = add %x, %s"), ("  func", f"{WIDE}  func")],
        ["the all_reduce at model.py:13 has a wrong operand", "the linear at model.py:12 takes"],
        13,
    ),
    "added to the result of a root": (
        [
            (
                "%y = add %x, %s",
                '%g = reduce %t {axis="tp", group_size=2} : f32[B, 4] loc("model.py":12)\n    '
                '%w = add %g, %x : f32[B, 4] loc("model.py":13)\n    '
                '%z = all_reduce %w {axis="tp", group_size=2} : f32[B, 4] loc("model.py":14)\n'
                "    %y = add %x, %s",
            )
        ],
        ["the all_reduce at model.py:14 has a wrong operand", "the add at model.py:13 takes"],
        14,
    ),
    "a bias on every rank": (
        [("linear %a, @down", "linear %a, @down, bias=@bias")],
        [
            "the all_reduce at model.py:4 in mlp has a wrong operand",
            "the linear at model.py:3 in mlp adds its bias once per rank of tp",
            "add it behind the all_reduce instead",
        ],
        4,
    ),
    "a state computed from a partial sum": (
        [
            (
                "%n = neg %k",
                '%w = tanh %t : f32[B, 4] loc("model.py":8)\n    '
                '%v = linear %w, @k : f32[B, 2] loc("model.py":9)\n    %n = add %k, %v',
            ),
            (
                "  func",
                '  weight @k : f32[2, 4] = random("k", 7, 0.5, [4, 4]).shard(0, tp)\n  func',
            ),
        ],
        ["the result k of @forward is not what its layout f32[B, 4@tp] says", "the tanh at model"],
        6,
    ),
    "a partial state": (
        [("%n = neg %k", "%n = slice %t {dim=1, start=0, stop=2}")],
        [
            "the result k of @forward is a partial sum over tp, but its layout is f32[B, 4@tp]",
            "because the linear at model.py:3 in mlp uses @down",
        ],
        6,
    ),
    "reduced twice": (
        [
            (
                "%y = add %x, %s",
                '%z = all_reduce %s {axis="tp", group_size=2} : f32[B, 4] loc("model.py":8)\n'
                "    %y = add %x, %z",
            )
        ],
        [
            "the all_reduce at model.py:8 reduces a value that is the same on all ranks of tp "
            "already, since the all_reduce at model.py:4 in mlp",
            "makes 2 times the value: leave it out",
        ],
        8,
    ),
    "reduced over the wrong axis": (
        [('all_reduce %t {axis="tp"', 'all_reduce %t {axis="dp"')],
        ["the same on all ranks of dp already, because the linear at model.py:3 in mlp uses"],
        4,
    ),
    "an argument is reduced": (
        [("%t {axis", "%x {axis")],
        ["because nothing splits %x over it"],
        4,
    ),
}


ALLOWED = {
    "as it is": [],
    "a maximum of a replicated value": [
        ('all_reduce %t {axis="tp"', 'all_reduce %x {axis="tp", op="max"')
    ],
    "a sharded result with its layout": [
        ("return %y", "return %a"),
        ("(y: f32[B, 4]", "(y: f32[B, 8]"),
        ("layouts(", "layouts(y: f32[B, 16@tp], "),
    ],
    "a sum that is cast, padded and sliced": [
        (
            "all_reduce %t",
            "cast %t {dtype=\"bf16\"} : bf16[B, 4]\n    "
            "%s1 = pad %s {before=[0, 0], after=[0, 2]} : bf16[B, 6]\n    "
            '%s2 = reduce_scatter %s1 {axis="tp", dim=1, group_size=2} : bf16[B, 3]\n    '
            '%s3 = all_gather %s2 {axis="tp", dim=1, group_size=2} : bf16[B, 6]\n    '
            "%s4 = slice %s3 {dim=1, start=0, stop=4} : bf16[B, 4]\n    "
            '%s5 = cast %s4 {dtype="f32"} : f32[B, 4]\n    %s6 = all_reduce %t',
        ),
        ("add %x, %s", "add %s6, %s5"),
    ],
    "zeros are added": [
        (
            "all_reduce %t",
            "full {value=0.0, shape=[B, 4]} : f32[B, 4]\n    %s1 = add %s, %t : f32[B, 4]\n"
            "    %s2 = all_reduce %s1",
        ),
        ("add %x, %s", "add %x, %s2"),
    ],
    "a bias on one rank": [
        (
            "%s = all_reduce %t",
            f'{RANK}%c = constant {{values=[0], dtype="i32"}} : i32[]\n    '
            "%q = eq %r, %c : bool[]\n    "
            "%z = constant {values=[0.0]} : f32[]\n    "
            "%b = where %q, @bias, %z : f32[4]\n    "
            "%u = add %t, %b : f32[B, 4]\n    %s = all_reduce %u",
        )
    ],
    "partial sums are gathered and added": [
        (
            'all_reduce %t {axis="tp", group_size=2} : f32[B, 4]',
            'all_gather %t1 {axis="tp", dim=0, group_size=2} : f32[2, B, 4]',
        ),
        ("%s = ", "%t1 = unsqueeze %t {dims=[0]} : f32[1, B, 4]\n    %s = "),
        ("add %x, %s", "reduce_sum %s {dims=[0]}"),
    ],
    "a root samples": [
        (
            'all_reduce %t {axis="tp", group_size=2} : f32[B, 4]',
            'reduce %t {axis="tp",root=1,group_size=2} : f32[B, 4]\n    %s1 = tanh %s : f32[B, 4]\n'
            '    %s2 = broadcast %s1 {axis="tp", root=1, group_size=2} : f32[B, 4]',
        ),
        ("add %x, %s", "add %x, %s2"),
    ],
    "an axis of one rank": [
        ("dp=2, tp=2", "dp=2, tp=1"),
        ("[16, 4]", "[8, 4]"),
        ("[4, 16]", "[4, 8]"),
        ("[10, 4]", "[5, 4]"),
        ("4@tp]", "2@tp]"),
        (
            "%s = all_reduce %t",
            '%s0 = all_reduce %x {axis="tp", group_size=1} : f32[B, 4]\n    %s = neg %s0',
        ),
        (' {axis="tp", group_size=2}', ""),
    ],
}  # fmt: skip
