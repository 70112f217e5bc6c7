"""Differences of texts: a change shows where it is, however much it renumbers."""

import random

import irc.passes
from irc.ir.core import Module
from irc.pipeline import PASSES, Stats
from irc.pipeline.instruments import Limit
from irc.pipeline.run import run_pipeline
from irc.testing.draw import random_graph
from irc.text import parse_module
from irc.text.diff import differences, with_names_of
from tests.fresh import session_seed
from tests.random_modules import random_module

assert irc.passes


def changed(old: str, new: str) -> list[str]:
    """The changed lines of a diff, and its hunks."""
    lines = list(differences(old, new, context=1))[2:]
    return [line for line in lines if line[0] != " "]


def nameless(text: str) -> str:
    """A module with every inner value numbered."""
    module = parse_module(text)
    for op in module.ops():
        for result in op.results:
            result.name = None
    return str(module)


def chain(*ops: str) -> Module:
    """A function with one operation after the other, each on the result of the one before."""
    names = ["%x", *(f"%{n}" for n in range(len(ops)))]
    lines = [
        f"    {name} = {op.format(of)} : f32[B, 4]\n"
        for op, of, name in zip(ops, names, names[1:], strict=False)
    ]
    body = "".join(lines)
    return parse_module(
        f"module @m {{\n  func @f(%x: f32[B, 4]) -> (f32[B, 4]) {{\n{body}"
        f"    return {names[-1]}\n  }}\n}}\n"
    )


def test_an_operation_that_is_gone_or_new_is_one_hunk() -> None:
    ops = ["exp {}", "neg {}", "silu {}"] * 20
    long, short = str(chain(*ops)), str(chain(*ops[:30], *ops[31:]))
    at = long.splitlines()[32:34]
    assert changed(long, short)[1:] == [f"-{at[0]}", f"-{at[1]}", f"+{at[1].replace('%30', '%29')}"]
    assert len(changed(short, long)) == 4  # in the other direction as well


def test_a_value_that_replaces_another_takes_its_name() -> None:
    ops = ["exp {}", "neg {}"] * 20
    old, new = str(chain(*ops)), str(chain(*ops[:20], "sigmoid {}", *ops[21:]))
    assert changed(old, new)[1:] == [
        "-    %20 = exp %19 : f32[B, 4]",
        "+    %20 = sigmoid %19 : f32[B, 4]",
    ]


def test_changes_in_several_places_do_not_meet() -> None:
    ops = ["exp {}", "neg {}", "silu {}"] * 20
    new = [*ops[:10], "abs {}", *ops[11:30], *ops[31:45], "sqrt {}", "sqrt {}", *ops[45:]]
    found = changed(str(chain(*ops)), str(chain(*new)))
    assert sum(line.startswith("@@") for line in found) == 3
    assert len(found) <= 3 + 2 + 3 + 4


def test_one_rewrite_among_equal_operations() -> None:
    """The layers have equal constants, whose number changes."""
    layer = "    %y{0} = full {{value=2.0}} : f32[]\n    %z{0} = mul {1}, %y{0} : f32[B, 4]\n"
    body = "".join(layer.format(n, f"%z{n - 1}" if n else "%x") for n in range(20))
    text = f"module @m {{\n  func @f(%x: f32[B, 4]) -> (f32[B, 4]) {{\n{body}"
    old = nameless(text + "    return %z19\n  }\n}\n")
    for count in (1, 2, 19):
        module = parse_module(old)
        run_pipeline(module, "cse", [Limit({"cse": count})])
        found = [line for line in changed(old, str(module)) if line[0] != "@"]
        assert len(found) == 3 * count, "a constant goes, and its user takes the first one"


def test_names_are_compared_last() -> None:
    ops = ["exp {}", "neg {}", "silu {}"]
    old, short = str(chain(*ops)), str(chain(*ops[:2]))
    renamed = old.replace("%1", "%other")
    assert with_names_of(old, renamed) == old
    assert len(changed(old, renamed)) == 5, "nothing else differs"
    gone = changed(renamed, short)
    assert [line for line in gone if line[0] == "+"] == ["+    return %other"]


def test_a_name_in_a_string_is_none() -> None:
    text = 'module @m {\n  file @a = "%0"\n  func @f(%x: f32[2]) -> (f32[2]) {\n'
    text += "    %0 = exp %x : f32[2]\n    return %0\n  }\n}\n"
    new = text.replace("    %0 = exp %x", "    %0 = neg %x : f32[2]\n    %1 = exp %0")
    new = new.replace("return %0", "return %1")
    assert '"%0"' in with_names_of(text, new)


def test_every_diff_is_one_of_the_same_modules() -> None:
    """The renamed text is that of the same module."""
    rng, seed = random.Random(session_seed()), session_seed()
    for number in range(20):
        module = random_graph(seed + number)
        old = str(module)
        pass_ = rng.choice(["canonicalize", "cse", "dce", "fold", "expand", "inline"])
        PASSES[pass_]().run(module, Stats())
        new = str(module)
        renamed = with_names_of(old, new)
        assert nameless(renamed) == nameless(new), f"{pass_} of seed {seed + number}"
        assert with_names_of(renamed, new) == renamed


def test_other_names_alone_are_found_to_be_nothing_else() -> None:
    rng, seed = random.Random(session_seed()), session_seed()
    for number in range(20):
        module = random_module(seed + number)
        old = str(module)
        for op in module.ops():
            for result in op.results:
                result.name = rng.choice([None, result.name, "a", "b"])
        assert with_names_of(old, str(module)) == old, f"seed {seed + number}"
