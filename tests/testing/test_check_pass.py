"""`check_pass` finds the mistakes of passes, in small modules, and accepts the passes of irc."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import irc
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.pipeline import load_file, parse_pipeline
from irc.rewrite.rules import Rule
from irc.testing import check_pass
from irc.testing.draw import Draw
from irc.testing.findings import Examiner
from irc.testing.instances import put_pattern
from irc.testing.wanted import Arrays, Wanted
from tests.cli.runner import entries
from tests.cli.runner import irc as run
from tests.fresh import session_seed
from tests.matrix.test_passes import ANYWHERE, REFUSALS
from tests.user_code import restored_registries

FAULTS = Path(__file__).with_name("faults.py")
# What is said of each pass, and the most operations of the module in which it is seen.
FOUND = {
    "drops-a-bias": ("the results change: .* is off by", 4),
    "computes-in-f16": ("the results change: .* is off by", 1),
    "confuses-activations": ("the results change: .* is off by", 1),
    "changes-the-type": ("a rewrite must keep the types", 2),
    "writes-another-eps": ("the results change: .* is off by", 1),
    "fails-at-odd-sizes": ("the results change: .* is off by", 2),
    "has-a-bug": ("IndexError", 1),
    "fails-on-3-ranks": (r"the results change: .* is off by .*(\n.*)* on tp=3", 2),
    "swaps-each-time": ("a second run changes the module again", 1),
    "changes-others": (r"the rewrite of `.* = neg .*` also changes `.* = add", 6),
    "does-not-ask": ("it changes operations without a rewrite", 4),
    "remembers": ("two runs over one module differ", 6),
}


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    """The passes with mistakes are registered."""
    with restored_registries():
        load_file(FAULTS)
        yield


def seeds(count: int) -> range:
    """Seeds of this session."""
    first = session_seed() % 10**6 * 1000
    return range(first, first + count)


@pytest.mark.parametrize("name", FOUND)
def test_a_mistake_is_found_in_a_small_module(name: str, tmp_path: Path) -> None:
    said, most = FOUND[name]
    with pytest.raises(AssertionError) as caught:
        check_pass(name, seeds=seeds(400), folder=tmp_path)
    message = str(caught.value)
    assert re.search(said, message), message
    text = (tmp_path / "case.irc").read_text()
    module = irc.parse(text)
    assert message.endswith(text.partition("\n")[2])
    assert sum(1 for _ in module.main) - 1 <= most, message
    (command,) = re.findall(r"^    (irc opt .*)$", message, re.M)
    assert text.startswith(f"// {command}\n") and f"--load {FAULTS}" in command
    answer = run(*shlex.split(command)[1:])
    if "results" in message or name in ("changes-the-type", "has-a-bug"):
        assert answer.status == 1 and f"the pass {name}" in answer.err
    elif "--diff" in command:
        assert answer.status == 0 and "+++ after" in answer.err


@pytest.mark.parametrize("name", [name for name in ANYWHERE if name != "inline"])
def test_the_passes_of_irc_are_right(name: str) -> None:
    few = 12 if name in ("fold", "dce", "cse", "fuse-norm", "fuse-qkv") else 5
    try:
        check = check_pass(name + ANYWHERE[name], seeds=seeds(few), refusals=REFUSALS.get(name, ()))
    except Error as error:  # a pass without rules may apply in none of so few
        assert re.search("applied in 0 of|no results were compared", error.message)
        assert name not in ("canonicalize", "expand")
        return
    assert check.applied.total() <= check.modules
    assert str(check).startswith(f"{name} applied in {check.applied.total()} of {check.modules}")


def test_a_transposed_scalar() -> None:
    text = """module @m {
  func @forward(%x: f32[]) -> (f32[]) {
    %a = reshape %x {shape=[]} : f32[]
    %b = transpose %a {order=[]} : f32[]
    %c = reshape %b {shape=[]} : f32[]
    return %c
  }
}"""
    assert check_pass("canonicalize", modules=[text], seeds=()).applied["tp=1"]


def test_given_modules_are_used_and_placed(tmp_path: Path) -> None:
    text = """module @m {
  weight @w : f32[6, 5] = random("w", 1, 0.4)
  func @callee(%x: f32[B, 5]) -> (f32[B, 6]) { %y = linear %x, @w : f32[B, 6] return %y }
  func @forward(%x: f32[B, 5]) -> (f32[B, 6]) {
    %y = call %x {callee=@callee} : f32[B, 6]
    return %y
  }
}"""
    path = tmp_path / "m.irc"
    path.write_text(text)
    for given in (text, irc.parse(text), path, str(path)):
        check = check_pass("inline", modules=[given], seeds=())
        assert dict(check.applied) == {f"tp={n}": 1 for n in (1, 2, 3, 4)}
    assert dict(check_pass("inline", modules=[text], seeds=(), mesh="tp=5").applied) == {"tp=5": 1}
    with pytest.raises(Error, match=r"inline applied in 0 of .*; give modules="):
        check_pass("inline", seeds=range(3))
    for missing in (tmp_path / "none.irc", "none.irc"):
        with pytest.raises(Error, match=r"no file|cannot read"):
            check_pass("inline", modules=[missing])
    with pytest.raises(Error, match="takes one pass, found 2"):
        check_pass("cse, dce")
    with pytest.raises(Error, match="tp=x"):
        check_pass("cse", mesh="tp=x")
    with pytest.raises(Error, match="did you mean 'inline'"):
        check_pass("inlin")


def test_a_refusal_is_a_failure_unless_it_is_permitted() -> None:
    text = """module @m mesh(tp=2) { func @f(%x: f32[4@tp]) -> (f32[4@tp]) {
      %y = neg %x : f32[4@tp]
      return %y } }"""
    with pytest.raises(AssertionError, match="the module is in the local view already"):
        check_pass("localize", modules=[text], seeds=())
    with pytest.raises(Error, match=r"refused \d modules: the module is in the local view already"):
        check_pass("localize", modules=[text], seeds=(), refusals=["local view"])
    assert check_pass("localize", modules=[text], seeds=(), idempotent=False).applied["tp=2"]


def test_a_tolerance_permits_what_a_dtype_does_not() -> None:
    check = check_pass("computes-in-f16", seeds=seeds(9), tolerance=0.05, mesh="tp=1")
    assert check.applied.total() and check.rewrites["narrow"]


SILU = """module @m {{
  {file}
  weight @w : {dtype}[6, 5] = {weight}
  func @forward(%x: {dtype}[B, 5]) -> ({dtype}[B, 6]) {{
    %a = linear %x, @w : {dtype}[B, 6]
    %y = silu %a : {dtype}[B, 6]
    return %y
  }}
}}"""


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("spread", [0.001, 0.05, 1.0])
def test_limits_follow_the_numbers_of_the_results(
    dtype: str, spread: float, tmp_path: Path
) -> None:
    given = SILU.format(file="", dtype=dtype, weight=f'random("w", 0, {spread})')
    with pytest.raises(AssertionError, match="the results change"):
        check_pass("confuses-activations", modules=[given], seeds=(), folder=tmp_path)


def test_what_cannot_be_compared_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SILU.format(file='file @f = "none.safetensors"', dtype="f32", weight='@f["w"]')
    with pytest.raises(Error, match=r"module 1 on tp=1: .* cannot be compared: .*none.safetens"):
        check_pass("confuses-activations", modules=[given])
    given = SILU.format(file="", dtype="f32", weight='random("w", 0, inf)')
    with pytest.raises(Error, match=r"cannot be compared: .* number"):
        check_pass("confuses-activations", modules=[given])
    evaluated, number = Wanted.of, count()

    def of(module: Module, inputs: Arrays, tolerance: float, every: int = 1) -> Wanted:
        if next(number) % every == 0:
            raise Error("not today\nreally")
        return evaluated(module, inputs, tolerance)

    monkeypatch.setattr(Wanted, "of", of)
    with pytest.raises(Error, match="no results were compared"):
        check_pass("confuses-activations", seeds=seeds(12), mesh="tp=1")
    monkeypatch.setattr(Wanted, "of", partial(of, every=3))
    check = check_pass("canonicalize", seeds=seeds(12), mesh="tp=1")
    assert 0 < check.uncompared["not today"] < check.applied.total()
    assert f"not compared in {check.uncompared['not today']}: not today\n" in str(check)


def test_only_failing_cases_leave_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert check_pass("canonicalize", seeds=seeds(4)).applied.total()
    assert entries(tmp_path) == []
    cls = type(parse_pipeline("fails-on-3-ranks").passes[0])
    monkeypatch.setattr(cls, "__module__", "notebook")  # without a file
    with pytest.raises(AssertionError, match=r"irc opt .*irc-check-\w+/case.irc --passes"):
        check_pass(cls, seeds=seeds(400))
    (folder,) = tmp_path.iterdir()
    assert "case.irc" in entries(folder)
    new = tmp_path / "new" / "folder"
    with pytest.raises(AssertionError, match=str(new)):
        check_pass("fails-on-3-ranks", seeds=seeds(400), folder=new)


@pytest.mark.parametrize("name", ["canonicalize", "fuse-gated-mlp"])
def test_what_is_put_into_modules_matches(name: str) -> None:
    examiner = Examiner(parse_pipeline(name).passes[0])
    examiner.run(Draw(0).module)
    put = Counter[str]()
    for number, rule in enumerate(examiner.rules.values()):

        def block(draw: Draw, rule: Rule = rule) -> None:
            op = put_pattern(draw, draw.rng.choice(rule.variants)).producer
            assert op is not None
            ways = [match(op) for cls, match in rule.matchers if isinstance(op, cls)]
            assert any(list(way) for way in ways), f"{rule.name} does not match {op}"
            put[rule.name] += 1

        for seed in seeds(10):
            verify(Draw(seed + 100 * number, steps=0, blocks=[block]).module)
    assert len(put) > 0.6 * len(examiner.rules), examiner.rules.keys() - put.keys()
