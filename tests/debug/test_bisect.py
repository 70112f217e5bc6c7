"""`irc bisect` names the pass, the rewrite and the scope of faults planted at one rewrite."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.onnx.emitter import TABLE, Emitter
from irc.backends.reference import evaluate
from irc.debug.bisect import Found, bisect
from irc.debug.checks import Numerics
from irc.driver.sources import find_source
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.ops import Silu
from irc.pipeline import Pass, Stats, parse_pipeline, register
from irc.pipeline.instruments import random_inputs, small_sizes
from irc.rewrite import permit
from irc.text.printer import print_module
from tests.cli.runner import irc as command
from tests.cli.runner import refused, works
from tests.compare.faults import FAULTS, MODELS
from tests.debug.planted import plant, rewrites
from tests.fresh import fresh
from tests.layout import ROOT
from tests.sharded.models import tiny_llama
from tests.user_code import restored_registries

LLAMA = ROOT / "examples" / "llama.py"
FUSE_NORM = ROOT / "passes" / "fuse_norm.py"


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    """The pass `planted`."""
    with restored_registries():
        plant()
        yield


BLOCK = """%aI = silu X : f32[2, 8]
%bI = silu X : f32[2, 8]
%cI = add %aI, %bI : f32[2, 8]
%dI = transpose %cI {order=[1, 0]} : f32[8, 2]
%eI = transpose %dI {order=[1, 0]} : f32[2, 8]
%fI = add X, %eI : f32[2, 8]
%gI = rms_norm %fI, @nI : f32[2, 8]
%hI = linear %gI, @gI : f32[2, 8]
%iI = silu %hI : f32[2, 8]
%jI = linear %gI, @uI : f32[2, 8]
%kI = mul %iI, %jI : f32[2, 8]
%lI = add %fI, %kI : f32[2, 8]"""


def blocks(count: int) -> Module:
    """Blocks in which every one of these passes has something to rewrite."""
    weights, lines = list[str](), list[str]()
    for i in range(count):
        weights += [f'weight @n{i} : f32[8] = random("n{i}", 1, 1.0)']
        weights += [f'weight @{w}{i} : f32[8, 8] = random("{w}{i}", 1, 0.4)' for w in "gu"]
        for row in (
            BLOCK.replace("X", f"%l{i - 1}" if i else "%x").replace("I", str(i)).splitlines()
        ):
            lines += [f'{row} loc("m.py":{len(lines) + 1} "layers.{i}.{row[1]}")']
    body = "\n".join([*lines, f"return %l{count - 1}"])
    head = "\n".join(weights)
    return irc.parse(f"module @m {{ {head} func @f(%x: f32[2, 8]) -> (f32[2, 8]) {{ {body} }} }}")


def found(module: Module, pipeline: str) -> Found:
    """What is found; there is something to find."""
    answer = bisect(module, parse_pipeline(pipeline), Numerics(module))
    assert answer is not None
    return answer


SHARD = 'shard{mesh="tp=2"}'
PLACES = {
    "tp1": "dce, PASS, fuse-gated-mlp, dce",
    "tp2": f"{SHARD}, PASS, localize, dce",
    "local": f"{SHARD}, localize, PASS, dce",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("inner", ["canonicalize", "cse", "fuse-norm", "fuse-gated-mlp"])
def test_the_rewrite_of_a_fault_is_named(inner: str, place: str) -> None:
    true = rewrites(blocks(4), parse_pipeline(PLACES[place].replace("PASS", inner)), inner)
    at = int(fresh(3).integers(1, len(true) + 1))
    pipeline = PLACES[place].replace("PASS", f'planted{{inner="{inner}", at={at}}}')
    answer = found(blocks(4), pipeline)
    rule, where = true[at - 1]
    assert (answer.after.pipeline.passes[-1].name, answer.number, answer.total) == (
        "planted",
        at,
        len(true),
    )
    assert (answer.after.where, answer.after.rule) == (where, rule)


@pytest.mark.parametrize("right", ["fuse-qkv, cse", f"fuse-qkv, {SHARD}, localize"])
def test_a_fault_in_the_fused_projections_of_a_llama(right: str) -> None:
    module = find_source(LLAMA, random_weights=1, settings={"layers": "3"}).module
    copy = irc.parse(print_module(module, locs=True))
    true = rewrites(copy, parse_pipeline(right), "fuse-qkv")
    at = int(fresh(4).integers(1, len(true) + 1))
    answer = found(module, right.replace("fuse-qkv", f'planted{{inner="fuse-qkv", at={at}}}'))
    assert (answer.number, answer.after.where) == (at, true[at - 1][1])


def test_of_two_faults_the_first_is_found() -> None:
    twice = 'cse, planted{inner="fuse-norm", at=2}, fuse-gated-mlp, planted{inner="cse", at=1}'
    answer = found(blocks(4), f"{twice}, dce")
    assert (
        len(answer.after.pipeline) == 2
        and answer.number == 2
        and answer.after.where.endswith("1.g")
    )
    trusted = parse_pipeline('planted{inner="cse", at=1}, planted{inner="fuse-norm", at=3}')
    module = blocks(4)
    start = irc.parse(print_module(module, locs=True))
    irc.run_passes(start, str(trusted.passes[0]))
    second = bisect(module, trusted, Numerics(start), trusted=1)
    assert second is not None and second.number == 4 + 3  # of both runs of `planted` together


@pytest.fixture
def faulty() -> None:
    """Passes with other faults: one raises, one leaves wrong types, one asks for no rewrite."""

    @register("faulty")
    class Faulty(Pass):
        how: str = "raise"

        def run(self, module: Module, stats: Stats) -> None:
            norms = [op for op in module.main if op.opname == "rms_norm"]
            for number, op in enumerate(norms, 1):
                if self.how != "whole" and not permit("touch", op):
                    continue
                if number == 2 and self.how == "raise":
                    raise KeyError("lost")
                if number == 2 and self.how == "type":
                    op.result.type = op.result.type.replace(shape=(3, 3))
                if number == 2 and self.how == "whole":
                    op.set_operands((op.operands[0], norms[0].operands[1]))

    assert Faulty.name == "faulty"


@pytest.mark.parametrize("how", ["raise", "type", "whole"])
def test_passes_that_fail_and_passes_without_rewrites(how: str, faulty: None) -> None:
    answer = found(blocks(3), f"canonicalize, faulty{{how={how}}}, dce")
    assert len(answer.after.pipeline) == 2 and answer.number == (0 if how == "whole" else 2)
    reason = {"raise": "KeyError: 'lost'", "type": "3, 3", "whole": "the result result0"}[how]
    assert reason in answer.after.problem and bool(answer.after.text) == (how == "whole")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A file with a copy of fuse-norm, which loses the weight of the second of all norms."""
    text = FUSE_NORM.read_text().replace('"fuse-norm"', '"my-fuse-norm"')
    text = text.replace("from .shared", "from irc.passes.shared")
    wrong = (
        "if stats[new.opname] == 1:\n            new.set_operands((total.x, total.x, norm.weight))"
    )
    text = text.replace("for old, result", f"{wrong}\n        for old, result")
    path = tmp_path / "my_norm.py"
    path.write_text(text)
    return path


def test_the_command_on_an_artifact(copied: Path, tmp_path: Path) -> None:
    place = tmp_path / "a"
    pipeline = "inline, cse, my-fuse-norm, fuse-gated-mlp, dce"
    load, options = ("--load", copied), ("--random-weights", "1", "--set", "layers=3")
    works("compile", LLAMA, *options, *load, "--pipeline", pipeline, "-o", place)
    answer = works("bisect", place, *load)
    assert "pass 3, my-fuse-norm: the result logits: " in answer.out
    scope, lines = "model.layers.1.input_layernorm", LLAMA.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "self.input_layernorm(x)" in text)
    where = f"llama.py:{line} in {scope}"
    assert f"my-fuse-norm rewrite 2 of 5, rule my-fuse-norm, at {where}\n" in answer.out
    facts = works("bisect", place, *load, "--json").json["found"]
    assert (facts["pass"], facts["number"], facts["index"]) == ("my-fuse-norm", 2, 3)
    assert facts["where"] == where and sum(row[:1] == "+" for row in facts["diff"]) == 2
    check_replays(facts["commands"])
    dumped = ("--passes", pipeline, "--dump-dir", tmp_path / "dumps")
    works("opt", place / "input.irc", *load, *dumped)
    again = works("bisect", tmp_path / "dumps", *load, "--json").json["found"]
    assert (again["number"], again["where"]) == (2, where)


def check_replays(commands: dict[str, str]) -> None:
    """Raise unless the first command gives a good module, and the second a bad one."""
    modules = [irc.parse(works(*shlex.split(text)[1:]).out) for text in commands.values()]
    inputs = random_inputs(modules[0], small_sizes(modules[0]))
    good, bad = (evaluate(module, inputs)["logits"] for module in modules)
    wanted = evaluate(irc.parse(works("show", shlex.split(commands["before"])[2]).out), inputs)
    assert np.allclose(good, wanted["logits"], atol=1e-5) and not np.allclose(good, bad, atol=1e-3)


def test_a_command_as_the_check(copied: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(print_module(blocks(4), locs=True))
    search = ("bisect", path, "--pipeline", "cse, fuse-norm, dce")
    check = "test $(grep -c add_rms_norm {}) -lt 3 || { echo too many; false; }"
    answer = works(*search, "--check", check)
    assert "pass 2, fuse-norm: the command exits with 1: too many" in answer.out
    assert "fuse-norm rewrite 3 of 4, rule fuse-norm, at m.py:31 in layers.2.g" in answer.out
    nothing = command(*search, "--check", "test -s {}")
    said = "after all 3 passes is good; those between were not checked\n"
    assert nothing.status == 1 and said in nothing.out
    one = command("bisect", path, "--pipeline", "cse", "--check", 'test -s "{}"').out
    assert one == "nothing to find: the module after 1 pass is good\n"
    for more in ((), ("--good", "1")):
        passes = ("--pipeline", "cse" if more else "")
        assert "no passes to search" in refused("bisect", path, *passes, *more)
    assert "already before any pass" in refused(*search, "--check", "test ! -s {}")
    assert "has no {}" in refused(*search, "--check", "true")
    assert "cannot be run" in refused(*search, "--check", "no-such-command {}")
    assert "not allowed with argument --check" in refused(
        *search, "--check", "{}", "--backend", "onnx", status=2
    )
    assert "give --pipeline, or an artifact" in refused("bisect", path)
    assert "there is no" in refused("bisect", tmp_path / "none", "--pipeline", "cse")


def test_a_pass_that_rounds_may_be_trusted(tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(print_module(blocks(4), locs=True))
    passes = 'quantize{scheme=w4a16, group=8}, planted{inner="fuse-norm", at=2}'
    first = works("bisect", path, "--pipeline", passes).out
    head = first.partition("\n")[0]
    assert re.match(r"pass 1, quantize\{.*\}, which changes numbers by design: the res", head)
    assert "--good 1" in first
    answer = works("bisect", path, "--pipeline", passes, "--good", "1").out
    assert "planted rewrite 2 of 4" in answer
    nothing = command("bisect", path, "--pipeline", passes, "--tolerance", "10")
    assert nothing.status == 1 and nothing.out.startswith("nothing")


@pytest.mark.parametrize("mesh", ["tp=5", "dp=3, tp=2"])
def test_caches_and_sizes_that_a_mesh_pads_are_no_fault(mesh: str) -> None:
    pipeline = f'inline, shard{{mesh="{mesh}", sequence=true}}, PASS, localize, cse, dce'
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32}
    module = tiny_llama(**sizes, num_hidden_layers=2)
    right = pipeline.replace("PASS", "fuse-gated-mlp")
    assert bisect(module, parse_pipeline(right), Numerics(module)) is None
    wrong = pipeline.replace("PASS", 'planted{inner="fuse-gated-mlp", at=2}')
    answer = found(module, wrong)
    assert (answer.number, answer.total) == (2, 2)


def test_inputs_that_a_mesh_does_not_take() -> None:
    module = irc.parse("module @m { func @f(%x: f32[B, 4]) -> (f32[B, 4]) { return %x } }")
    inputs = {"x": np.ones((2, 4), np.float32)}
    with pytest.raises(Error, match=r"B is 2 in the input x, but .* a multiple of 3"):
        bisect(module, parse_pipeline('shard{mesh="dp=3"}'), Numerics(module, inputs))


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(print_module(blocks(4), locs=True))
    pipeline = f"{SHARD}, fuse-gated-mlp, localize"
    search = ("bisect", path, "--pipeline", pipeline, "--backend", "onnx")
    assert "onnx is right too" in command(*search).out
    right, at = TABLE.entries()[Silu][0], int(fresh(5).integers(0, 4))

    def wrong(emitter: Emitter, op: Silu) -> object:
        is_it = op.loc is not None and op.loc.scope == f"layers.{at}.b"
        return emitter.get(op.x) if is_it else right(emitter, op)

    monkeypatch.setitem(TABLE._table, Silu, wrong)
    answer = works(*search).out
    assert answer.startswith("the kernel of silu on onnx, at m.py:")
    assert f" in layers.{at}.b: the result result0" in answer


@pytest.mark.oracle
def test_faults_of_compare(tmp_path: Path) -> None:
    """One of those that `irc compare` has to find; IRC_TEST_FAULTS=30 tries all of passes."""
    faults = [fault for fault in FAULTS if fault.kind == "pass"]
    count = min(len(faults), int(os.environ.get("IRC_TEST_FAULTS", "1")))
    for number in fresh(6).permutation(len(faults))[:count]:
        fault = faults[number]
        folder = tmp_path / fault.family
        if not folder.exists():
            MODELS[fault.family].save(folder)
        with fault.planted():
            module = find_source(folder).module
            module.mesh = Mesh.parse(dict(fault.options).get("mesh", ""))
            answer = found(module, fault.pipeline)
            assert answer.after.pipeline.passes[-1] in parse_pipeline(str(fault.plant)), fault.name
        assert f"{fault.scope}." in f"{answer.after.where}." and answer.number, fault.name
