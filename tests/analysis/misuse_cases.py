"""Changes of one small module: reductions of a partial sum by another op, uses of the rank."""

from __future__ import annotations

from tests.analysis.replication_cases import FLOAT, LATE, MORE, RANK

MIXED = '%v = add %s, %f : f32[B, 4] loc("model.py":12)\n    '

REFUSED: dict[str, tuple[list[tuple[str, str]], list[str], int]] = {
    **{
        f"a {op} over a sum, {name}": (
            [
                (
                    'all_reduce %t {axis="tp", group_size=2} : f32[B, 4]',
                    f'{name} %t {{axis="tp", op="{op}", {rest}',
                ),
                ("add %x, %s", "neg %x"),
            ],
            [
                f"the {name} at model.py:4 in mlp takes the {op} of the partial sum",
                "over tp: the linear at model.py:3 in mlp uses @down, which is sharded over tp",
                "only op=sum completes it",
            ],
            4,
        )
        for op in ("max", "min", "prod")
        for name, rest in (
            ("all_reduce", "group_size=2} : f32[B, 4]"),
            ("reduce", "group_size=2} : f32[B, 4]"),
            ("reduce_scatter", "dim=1, group_size=2} : f32[B, 2]"),
        )
    },
    "a rank in a layer": (
        [
            ("%y = add %x, %s", f"{RANK}{FLOAT}{MIXED}%y = add %x, %v"),
            ("return %y", f"{MORE}{LATE}return %p"),
        ],
        [
            "the all_reduce at model.py:22 has a wrong operand",
            "the linear at model.py:20 takes for the same on all ranks of tp",
            "what the rank at model.py:10 makes another on each of them",
        ],
        22,
    ),
    "a rank in a sum": (
        [
            (
                "%s = all_reduce %t",
                f"{RANK}%i = neg %r : i32[]\n    {FLOAT.replace('%r', '%i')}{MIXED}"
                "%s = all_reduce %v",
            ),
            ("add %s, %f", "add %t, %f"),
        ],
        ["the all_reduce at model.py:4", "the add at model.py:12", "the rank at model.py:10"],
        4,
    ),
}

ALLOWED = {
    "parts times the number of a rank": [
        ("%t = linear %a", f"{RANK}{FLOAT}%w = mul %a, %f : f32[B, 8]\n    %t = linear %w")
    ],
    "numbers that make up the parts of a contraction": [
        (
            "%t = linear %a",
            f"{RANK}{FLOAT}%w = expand %f {{shape=[B, 8]}} : f32[B, 8]\n    %t = linear %w",
        )
    ],
    "a maximum of parts": [
        (
            "%s = all_reduce %t",
            "%w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]\n    "
            '%w1 = all_reduce %w {axis="tp", op="max", group_size=2} : f32[B, 1]\n    '
            "%s = all_reduce %t",
        ),
        ("add %x, %s", "add %w1, %s"),
    ],
    "angles of the positions of a rank": [
        (
            "%s = all_reduce %t",
            f"{RANK}{FLOAT}%i = mul %f, @bias : f32[4]\n    %c = cos %i : f32[4]\n    "
            "%q = mul %t, %c : f32[B, 4]\n    %s = all_reduce %q",
        )
    ],
    "parts chosen by rank in a layer": [
        (
            "return %y",
            f"{RANK}%u = constant {{values=[0.0]}} : f32[]\n    "
            '%c = constant {values=[0], dtype="i32"} : i32[]\n    %q = eq %r, %c : bool[]\n    '
            "%w = where %q, %y, %u : f32[B, 4]\n    "
            f"{MORE.replace('%y', '%w')}{LATE}return %p",
        )
    ],
    "rows taken by rank in a layer": [
        (
            "return %y",
            f"{RANK}%w = gather %y, %r {{dim=1}} : f32[B]\n    "
            "%w1 = unsqueeze %w {dims=[1]} : f32[B, 1]\n    "
            "%w2 = expand %w1 {shape=[B, 4]} : f32[B, 4]\n    "
            f"{MORE.replace('%y', '%w2')}{LATE}return %p",
        )
    ],
}
