"""Sequences of collectives per rank, their ids, and ranks that would deadlock."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from irc.analysis.deadlock import check_ranks, check_sequences
from irc.analysis.events import Event, sequences
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.ops.collective import Collective
from irc.text import parse_module
from tests.analysis.local_modules import local_module
from tests.fresh import session_seed

TWO = "tp=2"
FOUR = "dp=2, tp=2"


def module_of(*lines: str, mesh: str = TWO) -> Module:
    """A module on x f32[4, 6] and z bf16[6] of the given lines, numbered as those of rank.py."""
    body = [f'    {line} loc("rank.py":{i})' for i, line in enumerate(lines, 1)]
    head = f"module @m local mesh({mesh}) dims(B=1:2:4) {{\n"
    head += "  func @forward(%x: f32[4, 6], %z: bf16[6], %v: f32[B, 3]) -> () {\n"
    module = parse_module("\n".join([head, *body, "    return\n  }\n}"]))
    verify(module)
    return module


def reduced(name: str, axis: str = "tp", of: str = "%x: f32[4, 6]", group_size: int = 2) -> str:
    value, type = of.split(": ")
    options = f'axis="{axis}", op="max", group_size={group_size}'
    return f"%{name} = all_reduce {value} {{{options}}} : {type}"


A, B = reduced("a"), reduced("b", of="%z: bf16[6]")
SENT = '%c = broadcast %x {axis="tp", root=ROOT, group_size=2} : f32[4, 6]'


def test_events_of_collectives() -> None:
    module = module_of(A, reduced("s", of="%v: f32[B, 3]"), SENT.replace("ROOT", "1"), mesh=FOUR)
    found = sequences(module)
    assert [len(events) for events in found] == [3] * 4
    first, second, third = found[2]
    assert found[3][0] is first
    assert found[0][0] is not first
    assert (first.kind, first.axes, first.group) == ("all_reduce", ("tp",), (2, 3))
    assert (str(first.type), first.bytes, first.root) == ("f32[4, 6]", 96, None)
    assert first.how == (("op", "max"),)
    assert str(second.bytes) == "12*B"
    assert (third.kind, third.root, third.how) == ("broadcast", 1, ())
    assert third.place is not None
    assert third.place.where() == "rank.py:3"
    assert [event.group for event in sequences(module_of(reduced("a", "dp"), mesh=FOUR))[1]] == [
        (1, 3)
    ]


@pytest.mark.parametrize("seed", [session_seed() * 1000 + i for i in range(20)])
def test_every_rank_runs_every_collective_in_order(seed: int) -> None:
    module = local_module(seed)
    communicating = [op for op in module.main if isinstance(op, Collective) and op.operands]
    for events in sequences(module):
        assert [event.op for event in events] == communicating


CALLS = """
module @m local mesh(tp=2) {
  func @block(%x: f32[4]) -> (f32[4]) {
    %y = all_reduce %x {axis="tp", op="max", group_size=2} : f32[4]
    return %y
  }
  func @forward(%x: f32[4]) -> (f32[4]) {
    %a = call %x {callee=@block} : f32[4]
    %b = call %a {callee=@block} : f32[4]
    return %b
  }
  func @other(%x: f32[4]) -> (f32[4]) {
    return %x
  }
}
"""


def test_every_execution_of_a_call_counts() -> None:
    module = parse_module(CALLS)
    assert [[event.kind for event in events] for events in sequences(module)] == [
        ["all_reduce"] * 2
    ] * 2
    assert sequences(module, "other") == [[], []]
    with pytest.raises(Error, match="has no function @lost"):
        sequences(module, "lost")
    check_ranks(module)


FUSED = """
module @m local mesh(tp=2) {
  weight @n : f32[4] = random("n", 7, 0.5)
  func @forward(%x: f32[3, 4]) -> () {
    %n, %s = all_reduce_rms_norm %x, %x, @n {axis="tp", group_size=2} : f32[3, 4], f32[3, 4]
    return
  }
}
"""


def test_fused_collectives_count() -> None:
    module = parse_module(FUSED)
    (event,) = sequences(module)[0]
    assert (event.kind, event.bytes, event.op.opname) == ("all_reduce", 48, "all_reduce_rms_norm")


# (the modules of the ranks, words of the Error in order)
MIXED: dict[str, tuple[list[Module], list[str]]] = {
    "another collective": (
        [module_of(A), module_of('%a = all_gather %x {axis="tp",dim=0,group_size=2} : f32[8, 6]')],
        [
            "ranks 0 and 1 meet in different communications",
            "rank 0 is in the all_reduce at rank.py:1 of f32[4, 6] (96 bytes) over tp (ranks 0 and",
            "rank 1 in the all_gather at rank.py:1 of f32[4, 6]",
        ],
    ),
    "one too many": (
        [module_of(A, reduced("c")), module_of(A)],
        [
            "rank 0 waits forever in the all_reduce at rank.py:2",
            "rank 1 has no such communication left",
            "Of ranks 0 and 1, rank 0 has 2 and rank 1 1",
        ],
    ),
    "one lost in the middle": (
        [module_of(A, "%n = neg %x : f32[4, 6]", reduced("c")), module_of("%n = neg %x : f32[4, 6]",
         "%o = neg %x : f32[4, 6]", reduced("c"))],
        ["They differ where rank 0 runs the all_reduce at rank.py:1 and rank 1 the all_reduce"],
    ),
    "a cycle of two": (
        [
            module_of(reduced("a"), reduced("b", "dp.tp", group_size=4), mesh=FOUR),
            module_of(reduced("a", "dp.tp", group_size=4), reduced("b"), mesh=FOUR),
            module_of(reduced("a"), reduced("b", "dp.tp", group_size=4), mesh=FOUR),
            module_of(reduced("a"), reduced("b", "dp.tp", group_size=4), mesh=FOUR),
        ],
        [
            "ranks 0 and 1 wait for each other forever",
            "rank 0 is in the all_reduce at rank.py:1",
            "over tp (ranks 0 and 1), op=max and waits for rank 1",
            "rank 1 is in the all_reduce at rank.py:1",
            "over dp.tp (ranks 0, 1, 2 and 3), op=max and waits for rank 0",
        ],
    ),
    "the same in another order": (
        [
            module_of("%p = neg %x : f32[4, 6]", "%q = exp %x : f32[4, 6]", *rest)
            for rest in (
                [reduced("a", of="%p: f32[4, 6]"), reduced("b", of="%q: f32[4, 6]")],
                [reduced("b", of="%q: f32[4, 6]"), reduced("a", of="%p: f32[4, 6]")],
            )
        ],
        [],
    ),
}  # fmt: skip


def without_locations(module: Module) -> Module:
    """A copy without source locations."""
    return parse_module(str(module))


@pytest.mark.parametrize("name", MIXED)
def test_ranks_that_would_deadlock(name: str) -> None:
    modules, words = MIXED[name]
    if not words:
        modules = [without_locations(module) for module in modules]
        words = ["ranks 0 and 1 run the same communications in another order", "%a", "%b"]
    with pytest.raises(Error) as caught:
        check_ranks(modules)
    text, at = caught.value.message, 0
    for word in words:
        assert word in text[at:], (word, text)
        at = text.index(word, at)


def test_ranks_without_a_deadlock() -> None:
    """Ranks may compute differently; the order of collectives matters within a group only."""
    check_ranks([module_of("%n = neg %x : f32[4, 6]", A, B), module_of(A, B)])
    check_ranks([module_of(reduced("a"), reduced("b", "dp"), mesh=FOUR)] * 4)
    own = module_of("%n = neg %x : f32[4, 6]", reduced("a", of="%n: f32[4, 6]"))
    check_ranks([own, module_of(A)])


# (modules that are not those of the ranks, words of the Error)
WRONG_MODULES = [
    ([], "found none"),
    ([module_of(A)], "1 modules for the 2 ranks"),
    ([module_of(A), module_of(A, mesh="tp=2, dp=1")], "that of rank 0 is .tp=2. and that of"),
    ([parse_module("module @g mesh(tp=1) { func @f() -> () { return } }")], "localize it"),
]


@pytest.mark.parametrize(("modules", "words"), WRONG_MODULES)
def test_modules_that_are_not_those_of_the_ranks(modules: list[Module], words: str) -> None:
    with pytest.raises(Error, match=words):
        check_ranks(modules)


def event(group: tuple[int, ...], kind: str = "all_reduce") -> Event:
    """An event made by hand."""
    (known,) = sequences(module_of(A))[0]
    return replace(known, group=group, kind=kind)


# (the events of the ranks, words of the Error)
WRONG_EVENTS = [
    ([[event((1, 2))], [], []], "rank 0 runs .*, whose group lacks it"),
    ([[event((0, 5))], []], "but there are 2 ranks, each once"),
    ([[event((0, 0, 1))], []], "but there are 2 ranks, each once"),
    ([[event((0, 1))], [event((1, 0))]], "ranks 0 and 1 wait for each other"),
    # rank 0 waits for the cycle, and is not in it
    ([[event((0, 1))], [event((1, 2))], [event((2, 1))]], "ranks 1 and 2 wait for each other"),
    ([[event((0, 1), "send")], [event((0, 1), "send")]], "rank 1 runs send .* lacks it"),
    ([[event((0, 1), "receive")], [event((0, 1), "receive")]], "rank 0 runs receive .* lacks it"),
    ([[event((0, 1), "send")], [event((0, 1))]], "ranks 0 and 1 meet in different"),
    ([[event((0, 1), "send")], []], "rank 0 waits forever in send of f32.* from rank 0 to 1"),
    (
        [
            [event((0, 1), "send"), event((1, 0), "receive")],
            [event((1, 0), "send"), event((0, 1), "receive")],
        ],
        "ranks 0 and 1 wait for each other",
    ),
]


@pytest.mark.parametrize(("found", "words"), WRONG_EVENTS)
def test_groups_and_pairs(found: list[list[Event]], words: str) -> None:
    with pytest.raises(Error, match=words):
        check_sequences(found)


def test_a_matching_pair() -> None:
    check_sequences([[event((0, 1), "send")], [event((0, 1), "receive")]])


STAGES = """
module @m local mesh(pp=2, tp=2) {
  func @stage0(%x: f32[4]) -> (f32[4], f32[4]) {
    %a = all_reduce %x {axis="tp", op="max", group_size=2} : f32[4] loc("s.py":1)
    return %a, %x
  }
  func @stage1(%x: f32[4], %y: f32[4]) -> (f32[4]) {
    %a = all_reduce %y {axis="tp", op="max", group_size=2} : f32[4] loc("s.py":2)
    return %a
  }
  func @forward(%x: f32[4]) -> (y: f32[4], z: f32[4]) {
    %a, %b = call %x {callee=@stage0, stage=0} : f32[4], f32[4] loc("s.py":3)
    %c = call %x, %a {callee=@stage1, stage=1} : f32[4] loc("s.py":4)
    return %c, %b
  }
}
"""


def test_stages_send_the_values_that_later_ones_use() -> None:
    module = parse_module(STAGES)
    found = [[(e.kind, e.group) for e in events] for events in sequences(module)]
    assert found == [
        [("all_reduce", (0, 1)), ("send", (0, 2))],
        [("all_reduce", (0, 1)), ("send", (1, 3))],
        [("receive", (0, 2)), ("all_reduce", (2, 3))],
        [("receive", (1, 3)), ("all_reduce", (2, 3))],
    ]
    check_ranks(module)


def test_stages_that_differ() -> None:
    """The later stage was built for another text."""
    module = parse_module(STAGES)
    for old, new, words in [
        ("call %x, %a", "call %x, %x", "rank 0 waits forever in send of f32[4] from rank 0 to 2"),
        ("f32[4]", "f32[8]", "meet in different communications: rank 0 is in send of f32[4]"),
    ]:
        other = parse_module(STAGES.replace(old, new))
        with pytest.raises(Error, match=re.escape(words)):
            check_ranks([module, module, other, other])
