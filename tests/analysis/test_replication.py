"""Replication analysis: its claims against numpy, and a case per rule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from irc.analysis.frames import Dataflow, Frame
from irc.analysis.replication import check_replication, entries, replication
from irc.backends.reference import evaluate_ranks
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.ops import Return
from irc.text import parse_module
from tests.analysis.local_modules import local_inputs, local_module
from tests.analysis.replication_cases import ALLOWED, MLP, REFUSED
from tests.analysis.test_mutations import EVERYWHERE, ON_ONE_RANK
from tests.fresh import session_seed


def changed(*changes: tuple[str, str]) -> Module:
    text = MLP
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    module = parse_module(text)
    verify(module)
    return module


def test_values_that_differ() -> None:
    module = changed(("%n = neg %k", '%r = rank {axis="tp"} : i32[]\n    %n = neg %k'))
    found = {value.name: set(axes) for value, axes in replication(module).items()}
    assert {name for name, axes in found.items() if not axes} == {"bias", "x", "ids", "s", "y"}
    assert {name for name, axes in found.items() if axes == {"tp"}} == set("khatnr") | {
        "up",
        "down",
        "table",
    }


@pytest.mark.parametrize("name", REFUSED)
def test_rule(name: str) -> None:
    changes, words, line = REFUSED[name]
    module = changed(*changes)
    with pytest.raises(Error) as caught:
        check_replication(module)
    text, at = str(caught.value), 0
    assert text.startswith(f"model.py:{line}"), text
    for word in words:
        assert word in text[at:], (word, text)
        at = text.index(word, at)


@pytest.mark.parametrize("name", ALLOWED)
def test_valid_changes(name: str) -> None:
    check_replication(changed(*ALLOWED[name].changes))


CALLS = """
module @m local mesh(tp=2) {
  weight @w : f32[4, 2] = random("w", 7, 0.5, [4, 4]).shard(1, tp)
  func @block(%x: f32[4, 2]) -> (f32[4, 4]) {
    %y = linear %x, @w : f32[4, 4] loc("block.py":1)
    return %y
  }
  func @outer(%x: f32[4, 2]) -> (f32[4, 4]) {
    %y = call %x {callee=@block} : f32[4, 4]
    %z = neg %y : f32[4, 4]
    return %z
  }
  func @forward(%x: f32[4, 2], %v: f32[4, 2]) -> (y: f32[4, 4]) layouts(%v: f32[4, 4@tp]) {
    %a = call %v {callee=@outer} : f32[4, 4]
    %b = all_reduce %a {axis="tp", group_size=2} : f32[4, 4] loc("block.py":9)
    return %b
  }
}
"""


def test_calls_are_followed() -> None:
    module = parse_module(CALLS)
    assert [function.name for function in entries(module)] == ["forward"]
    check_replication(module)
    found = {value: set(axes) for value, axes in replication(module).items()}
    assert found[module.functions["block"].args[0]] == {"tp"}
    lost = parse_module(CALLS.replace("return %b", "return %a"))
    with pytest.raises(Error, match=r"the linear at block\.py:1 uses @w"):
        check_replication(lost)
    early = parse_module(CALLS.replace("%z = neg %y", "%z = tanh %y"))
    with pytest.raises(Error, match=r"the tanh %z takes .*: the linear at block\.py:1 uses @w"):
        check_replication(early)


PASSED_ON = """
module @m local mesh(tp=2) {
  func @same(%x: f32[4]) -> (f32[4]) {
    return %x
  }
  func @forward(%v: f32[4]) -> (y: f32[4]) layouts(%v: f32[8@tp]) {
    %a = call %v {callee=@same} : f32[4]
    return %a
  }
}
"""


def test_an_argument_that_a_call_returns() -> None:
    with pytest.raises(
        Error, match=r"because %v is sharded over tp: put an all_gather .* behind %v"
    ):
        check_replication(parse_module(PASSED_ON))


def test_the_global_view_is_refused() -> None:
    with pytest.raises(Error, match=r"module @m is in the global view.*localize it first"):
        check_replication(parse_module("module @m { func @f() -> () { return } }"))


FUSED = """
module @m local mesh(tp=2) {
  weight @w : f32[4, 2] = random("w", 7, 0.5, [4, 4]).shard(1, tp)
  weight @n : f32[4] = random("n", 7, 0.5)
  func @forward(%x: f32[4, 4], %v: f32[4, 2]) -> (n: f32[4, 4], s: f32[4, 4]) layouts(%v: f32[4, 4@tp]) {
    %t = linear %v, @w : f32[4, 4] loc("f.py":1)
    %n, %s = all_reduce_rms_norm %t, %x, @n {axis="tp", group_size=2} : f32[4, 4], f32[4, 4] loc("f.py":2)
    return %n, %s
  }
}
"""  # noqa: E501


def test_a_norm_fused_with_a_sum() -> None:
    check_replication(parse_module(FUSED))
    twice = parse_module(FUSED.replace("%t, %x", "%x, %x"))
    with pytest.raises(Error, match=r"the all_reduce at f\.py:2 reduces .* nothing splits %x"):
        check_replication(twice)
    late = parse_module(FUSED.replace("%n, %s =", "%u = tanh %t : f32[4, 4]\n %n, %s =").replace(
        "all_reduce_rms_norm %t", "all_reduce_rms_norm %u"))  # fmt: skip
    with pytest.raises(Error, match=r"has a wrong operand: the tanh %u .* the linear at f\.py:1"):
        check_replication(late)


VARIATIONS = """
module @m local mesh(dp=2, tp=2) {
  weight @turned : f32[8, 2] = random("a", 7, 0.5, [4, 8]).shard(0, tp).transpose(1, 0)
  weight @stacked : f32[1, 2, 4] = concat(random("b", 7, 0.5, [4, 4]).shard(0, tp).unsqueeze(0); 0)
  weight @joined : f32[4, 2] = concat(random("c", 7, 0.5, [2, 4]).shard(1, tp),
    random("d", 7, 0.5, [2, 2]); 0)
  func @forward(%x: f32[4, 2], %y: f32[4, 8]) -> () layouts(%x: f32[16@dp.tp, 2]) {
    %gathered = all_gather %x {axis="tp", dim=0, group_size=2} : f32[8, 2]
    %columns = reshape %x {shape=[4, 1, 2]} : f32[4, 1, 2]
    %flat = reshape %x {shape=[8]} : f32[8]
    %summed = reduce_sum %x {dims=[0]} : f32[2]
    %scattered = reduce_scatter %summed {axis="dp", dim=0, group_size=2} : f32[1]
    %product = linear %x, @turned : f32[4, 8]
    %exchanged = all_to_all %x {axis="tp", split=1, concat=0, group_size=2} : f32[8, 1]
    %cut = collective_scatter %y {axis="tp", dim=1, group_size=2} : f32[4, 4]
    %rooted = collective_gather %cut {axis="tp", dim=1, group_size=2} : f32[4, 8]
    %squared = mul %rooted, %rooted : f32[4, 8]
    %zero = full {value=0.0, shape=[4, 8]} : f32[4, 8]
    return
  }
}
"""
# per value: the axes of its dimensions, those it is partial over, those it differs over otherwise
WANTED = {
    "turned": (((), ("tp",)), "", ""),
    "stacked": (((), ("tp",), ()), "", ""),
    "joined": (((), ()), "", "tp"),
    "x": ((("dp", "tp"), ()), "", ""),
    "gathered": ((("dp",), ()), "", ""),
    "columns": (((), (), ()), "", "dp tp"),
    "flat": ((("dp", "tp"),), "", ""),
    "summed": (((),), "dp tp", ""),
    "scattered": ((("dp",),), "tp", ""),
    "product": (((), ()), "", "dp tp"),
    "exchanged": ((("dp",), ("tp",)), "", ""),
    "cut": (((), ("tp",)), "", ""),
    "rooted": (((), ()), "tp", ""),
    "squared": (((), ()), "", "tp"),
    "zero": (((), ()), "", ""),
}


def test_how_values_differ() -> None:
    module = parse_module(VARIATIONS)
    verify(module)
    variations = Dataflow(module, lambda *_: None).entry(module.main).variations
    found = {str(value.name): variation for value, variation in variations.items()}
    for name, (split, partial, otherwise) in WANTED.items():
        variation = found[name]
        known = {axis for axes in variation.split for axis in axes} | variation.partial
        assert variation.split == split, name
        assert variation.partial == set(partial.split()), name
        assert variation.axes - known == set(otherwise.split()), name
        assert not variation.broken, name
        assert variation.zero == (name == "zero")


def test_reasons_are_found_in_time() -> None:
    """Every value is visited once."""
    lines = [f"%d{i} = add %d{i - 1}, %d{i - 1} : f32[B, 4]" for i in range(1, 60)]
    twice = "\n    ".join(["%d0 = neg %t : f32[B, 4]", *lines])
    module = changed(("return %y", f"{twice}\n    return %d59"))
    with pytest.raises(Error, match=r"because the linear at model\.py:3 in mlp uses @down"):
        check_replication(module)


@pytest.mark.parametrize("seed", [session_seed() * 1000 + i for i in range(30)])
def test_values_claimed_replicated_are_equal(seed: int) -> None:
    """Every value of a valid or damaged module, against the arrays of the ranks."""
    module = local_module(seed)
    rng = random.Random(seed)
    if rng.random() < 0.7:
        rng.choice([*EVERYWHERE, *ON_ONE_RANK])(module, rng)
    frame = Dataflow(module, lambda *_: None).entry(module.main)
    for value, ranks in computed(module, seed).items():
        check_claims(module, frame, value, ranks)


def computed(module: Module, seed: int) -> dict[Any, list[np.ndarray]]:
    """All values of the main function, one array per rank."""
    main = module.main
    values = [*main.args, *(result for op in main for result in op.results)]
    assert main.last is not None
    main.last.erase()
    main.append(Return(values))
    main.results = ()
    results = evaluate_ranks(module, local_inputs(module, seed))
    return {v: [found[f"result{i}"] for found in results] for i, v in enumerate(values)}


def check_claims(module: Module, frame: Frame, value: Any, ranks: list[np.ndarray]) -> None:
    variation = frame.variations[value]
    if variation.zero:
        assert not any(array.any() for array in ranks), value
    for axis in module.mesh.names:
        if axis in variation.axes:
            continue
        for group in module.mesh.groups((axis,)):
            for rank in group[1:]:
                assert ranks[rank].tobytes() == ranks[group[0]].tobytes(), (value, axis, rank)
