"""Instruments: what they report, in which order they run, and what is left after a failure."""

import io
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Value
from irc.ir.types import TensorType
from irc.ops import Sub
from irc.pipeline import Pass, Stats, register, run_pipeline
from irc.pipeline.instruments import (
    CheckNumerics,
    DumpDir,
    Instrument,
    Limit,
    PrintDiff,
    Replay,
    Reproducer,
    Statistics,
    Timing,
    VerifyEach,
    WhyNot,
    parse_limit,
    random_inputs,
    small_sizes,
)
from irc.pipeline.instruments.numerics import compare
from irc.rewrite import P, apply_rules, rule
from irc.text import parse_module
from tests.fresh import fresh
from tests.user_code import restored_registries

assert irc.passes
TEXT = """module @m dims(B=1:2:4) {
  func @f(%x: f32[B, 4], %y: f32[B, 4]) -> (out: f32[B, 4], other: f32[B, 4]) {
    %a = neg %x : f32[B, 4] loc("model.py":3 "mlp")
    %b = neg %a : f32[B, 4]
    %c = add %b, %y : f32[B, 4] loc("model.py":5)
    %d = add %b, %y : f32[B, 4]
    %e = exp %d : f32[B, 4]
    return %c, %d
  }
}
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def wrong() -> None:
    """A pass `wrong` whose rule confuses add with sub, and the passes `fail` and `break`."""

    @rule(P.add("x", "y"))
    def confuse(x: Value, y: Value) -> Sub:
        return Sub(x, y)

    @register("wrong")
    class Wrong(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            stats.update(apply_rules(module, [confuse]))

    @register("fail")
    class Fail(Pass):
        internal: bool = False

        def run(self, module: Module, stats: Stats) -> None:
            for op in list(module.main)[:-1]:
                module.main.unlink(op)  # half done when it fails
            raise KeyError("lost") if self.internal else Error("the dtypes differ")

    @register("slip")
    class Slip(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            json.loads("[")

    @register("break")
    class Break(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            next(iter(module.main)).result.type = TensorType("f64", (99,))

    made = (Wrong, Fail, Slip, Break)
    assert [each.name for each in made] == ["wrong", "fail", "slip", "break"]


def test_instruments_nest() -> None:
    log: list[str] = []

    class Log(Instrument):
        def __init__(self, name: str) -> None:
            for event in ("start", "before", "after", "leave", "finish"):
                setattr(self, event, lambda *_, text=f"{name} {event}": log.append(text))

    run_pipeline(parse_module(TEXT), "cse", [Log("a"), Log("b")])
    assert log == [
        *["a start", "b start", "a before", "b before", "b after", "a after"],
        *["b leave", "a leave", "b finish", "a finish"],
    ]


def test_masks_are_no_scale_of_other_numbers() -> None:
    """A mask of -3.4e38 must not hide what the other numbers are; those of a usual size may."""
    rng = fresh(0)
    before = rng.normal(0, 1, (4, 64))
    for mask in (-65504.0, -1e9, -3.4e38):
        masked = np.where(rng.random((4, 64)) < 0.7, mask, before)
        masked[0, :9] = before[0, :9]
        assert compare(masked, masked * (1 + 1e-7), 1e-6) is None
        other = masked.copy()
        other[0, 3] += 1e-2
        assert "1 of 256 elements differ, first at [0, 3]" in str(compare(masked, other, 1e-6))
    near = before + 1e-7
    assert compare(before, near, 1e-6) is None
    assert compare(np.zeros(3), np.array([0.0, 1e-9, 0.0]), 1e-6) is not None


def test_reports_of_passes() -> None:
    timing, statistics, out = Timing(), Statistics(), io.StringIO()
    pipeline = "cse, canonicalize, cse, dce"
    run_pipeline(parse_module(TEXT), pipeline, [timing, statistics, PrintDiff(out)])
    rows = [(row.pass_, row.ops_before, row.ops_after) for row in timing.rows]
    assert rows == [("cse", 6, 5), ("canonicalize", 5, 3), ("cse", 3, 3), ("dce", 3, 2)]
    assert all(row.seconds > 0 for row in timing.rows)
    lines = str(timing).splitlines()
    assert "6 -> 5 ops  cse" in lines[0] and lines[-1].endswith("total")
    assert [step.stats.total for step in statistics.steps] == [1, 1, 0, 1]
    text = str(statistics)
    assert "1. cse\n  merged  1\n2. canonicalize\n" in text
    twice = next(line for line in text.splitlines() if line.startswith("  twice"))
    assert "1  of 2 tries" in twice and "arithmetic_rules.py:" in twice
    assert "3. cse\n  nothing counted\n" in text
    diff = out.getvalue()
    assert diff.startswith("--- before\n+++ after cse\n")
    assert "-    %d = add %b, %y : f32[B, 4]\n" in diff
    headers = ["+++ after cse", "+++ after canonicalize", "+++ after dce"]
    assert [line for line in diff.splitlines() if line[:3] == "+++"] == headers


def test_the_command_of_a_dump_makes_it_again(tmp_path: Path) -> None:
    pipeline = 'canonicalize, expand{ops=["silu"]}, cse, dce'
    run_pipeline(parse_module(TEXT), pipeline, [DumpDir(tmp_path, Replay(["--no-verify"]))])
    first, *names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["001-canonicalize.irc", "002-expand.irc", "003-cse.irc", "004-dce.irc"]
    source = (tmp_path / first).read_text()
    assert str(parse_module(source)) == str(parse_module(TEXT))
    for name in names:
        text = (tmp_path / name).read_text()
        words = shlex.split(text.splitlines()[0].removeprefix("// "))
        assert words[:6] == ["irc", "opt", "000-input.irc", "--locs", "--no-verify", "--passes"]
        again = parse_module(source)
        run_pipeline(again, words[6])
        assert str(again) == str(parse_module(text))
    assert 'loc("model.py":5)' in (tmp_path / "004-dce.irc").read_text()


def test_dumps_replace_those_of_an_earlier_run(wrong: None, tmp_path: Path) -> None:
    kept = ["001-notes.irc", "010-cse.txt", "model.irc"]
    for name in kept:
        (tmp_path / name).write_text("// mine\n")
    with pytest.raises(Error, match="the dtypes differ"):
        run_pipeline(
            parse_module(TEXT), "cse, dce, fail", [DumpDir(tmp_path), Reproducer(tmp_path)]
        )
    found = {path.name for path in tmp_path.iterdir()} - {*kept}
    assert found == {"000-input.irc", "001-cse.irc", "002-dce.irc", "reproducer.irc"}
    run_pipeline(parse_module(TEXT), "dce", [DumpDir(tmp_path), Reproducer(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"000-input.irc", "001-dce.irc", *kept}


@pytest.mark.parametrize(
    ("name", "message", "kept"),
    [
        ("fail", r"the dtypes differ\n.*in the pass fail, number 1 of 1", False),
        (
            "fail{internal=true}",
            r"test_instruments\.py:\d+: the pass fail{internal=true} .number 1 of 1. has a bug: "
            r"KeyError: 'lost'\n    raise KeyError.*\n    \^\^\^",
            True,
        ),
        (
            "slip",
            r"test_instruments\.py:\d+: the pass slip .* has a bug: JSONDecodeError: "
            r"Expecting value.*\n    json.loads\(.*\n    \^\^\^",
            True,
        ),
        ("break", r"the module was valid before the pass break", True),
    ],
)
def test_only_a_fault_of_a_pass_makes_a_temporary_folder(
    wrong: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    message: str,
    kept: bool,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module = parse_module(TEXT)
    with pytest.raises(Error, match=message) as caught:
        run_pipeline(module, name, [Reproducer(), VerifyEach()])
    paths = list(tmp_path.glob("irc-reproducer-*/reproducer.irc"))
    assert len(paths) == kept == ("to reproduce" in str(caught.value))
    assert all("Traceback (most recent call last)" in path.read_text() for path in paths)
    if name == "break":
        with pytest.raises(Error) as caught:
            run_pipeline(module, "dce")  # the input is wrong already
        assert "pass" not in str(caught.value)


def test_a_dump_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="cannot write"):
        run_pipeline(parse_module(TEXT), "cse", [DumpDir(tmp_path / "file" / "x")])


def test_numerics_name_the_pass_and_the_first_result(wrong: None) -> None:
    check = CheckNumerics(evaluate)
    run_pipeline(parse_module(TEXT), "canonicalize, cse, dce", [check])
    with pytest.raises(Error, match=r"the pass wrong changes the result out: 8 of 8 elements"):
        run_pipeline(parse_module(TEXT), "canonicalize, wrong, dce", [VerifyEach(), check])


def test_limit_stops_rules_and_passes_without_rules(wrong: None) -> None:
    for name, count in (("wrong", 1), ("cse", 0), ("wrong", 0)):
        module = parse_module(TEXT)
        limit = Limit({name: count})
        steps = run_pipeline(module, name, [VerifyEach(), limit])
        assert steps[0].stats.total == count and limit.made == {name: count}
    assert Limit({"wrong": 1}).last == {}
    limit = Limit({"wrong": 1})
    run_pipeline(parse_module(TEXT), "wrong, wrong, canonicalize", [limit])
    assert limit.made == {"wrong": 1, "canonicalize": 1}
    assert limit.last["wrong"] == "model.py:5: confuse"


def test_every_pass_can_be_limited() -> None:
    text = """module @m {
      weight @w : f32[4, 4] = random("w", 1, 1.0)
      func @g(%x: f32[1, 4]) -> (f32[1, 4]) { %s = silu %x : f32[1, 4] return %s }
      func @f(%x: f32[1, 4]) -> (f32[1, 4]) {
        %dead = exp %x : f32[1, 4]
        %one = full {value=1.0} : f32[]
        %two = add %one, %one : f32[]
        %a = call %x {callee=@g} : f32[1, 4]
        %q = linear %x, @w : f32[1, 4]
        %b = silu %q : f32[1, 4]
        %c = linear %x, @w : f32[1, 4]
        %d = mul %b, %c : f32[1, 4]
        %e = mul %d, %one : f32[1, 4]
        %f = mul %e, %two : f32[1, 4]
        %h = linear %x, @w : f32[1, 4]
        %i = add %f, %h : f32[1, 4]
        %j = add %i, %a : f32[1, 4]
        return %j } }"""
    for name in ("inline", "canonicalize", "cse", "dce", "fold", "expand", "fuse-gated-mlp"):
        free = run_pipeline(parse_module(text), name)
        assert free[0].stats.total > 0, name
        module = parse_module(text)
        (step,) = run_pipeline(module, name, [VerifyEach(), Limit({name: 0})])
        assert step.stats.total == 0 and str(module) == str(parse_module(text)), name


def test_limits_are_read_and_checked() -> None:
    assert parse_limit("fuse-gated-mlp=7") == ("fuse-gated-mlp", 7)
    for text in ("cse", "cse=-1", "cse=x", "=3"):
        with pytest.raises(Error, match="write it as pass=count"):
            parse_limit(text)
    with pytest.raises(
        Error, match="--limit cze: the pipeline has no such pass; did you mean 'cse'"
    ):
        run_pipeline(parse_module(TEXT), "cse", [Limit({"cze": 1})])


@pytest.mark.parametrize("internal", [False, True])
def test_a_failure_can_be_reproduced(wrong: None, tmp_path: Path, internal: bool) -> None:
    folder = tmp_path / "crash dir"
    text = "cse, fail{internal=true}, dce" if internal else "cse, fail, dce"
    reproducer = Reproducer(folder, Replay(["--load", "my pass.py"]))
    with pytest.raises(Error) as caught:
        run_pipeline(parse_module(TEXT), text, [VerifyEach(), reproducer])
    path = folder / "reproducer.irc"
    message = str(caught.value)
    assert f"the module before this pass is in {path}" in message
    written = path.read_text()
    words = shlex.split(written.splitlines()[0].removeprefix("// "))
    load = ["--load", "my pass.py"]
    assert words[:7] == ["irc", "opt", str(path), "--locs", *load, "--passes"]
    assert words[7] == text.removeprefix("cse, ")
    assert ("KeyError: 'lost'" if internal else "the dtypes differ") in written
    before = parse_module(TEXT)
    run_pipeline(before, "cse")
    assert str(parse_module(written)) == str(before)  # as it was before the failing pass
    with pytest.raises(Error):
        run_pipeline(parse_module(written), words[7])
    assert str(parse_module(reproducer.text)) == str(before)


def test_a_failure_leaves_the_watches_off(wrong: None) -> None:
    with pytest.raises(Error):
        run_pipeline(parse_module(TEXT), "fail", [Limit({"fail": 0}), WhyNot("fail")])
    (step,) = run_pipeline(parse_module(TEXT), "wrong")
    assert step.stats.total == 2


def test_why_not() -> None:
    text = """module @m { weight @w : f32[4, 4] = random("w", 1, 1.0)
      func @f(%x: f32[B, 4]) -> (f32[B, 4]) {
        %s = silu %x : f32[B, 4] %u = exp %x : f32[B, 4]
        %m = mul %s, %u : f32[B, 4] loc("llama.py":97 "mlp") return %m } }"""
    why, other = WhyNot("fuse-gated-mlp"), WhyNot("cse")
    run_pipeline(parse_module(text), "cse, fuse-gated-mlp, dce", [why, other])
    assert (
        str(why)
        == "llama.py:97 in mlp: mul(silu) matched; operand 1 of silu is an argument, not linear"
    )
    assert str(other) == "cse: no rule nearly matched"
    with pytest.raises(Error, match="--why-not cze: the pipeline has no such pass; did you mean"):
        run_pipeline(parse_module(text), "cse", [WhyNot("cze")])


def test_why_not_and_a_limit_together(wrong: None) -> None:
    why, limit = WhyNot("wrong"), Limit({"wrong": 1})
    (step,) = run_pipeline(parse_module(TEXT), "wrong", [limit, why])
    assert step.stats.total == 1 and why.failures == []


# -- the comparison of numerics


def test_numerics_notice_a_lost_result() -> None:
    results = iter([{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    check = CheckNumerics(lambda module, inputs: next(results))
    with pytest.raises(Error, match="the pass dce changes the results a: they are b"):
        run_pipeline(parse_module(TEXT), "dce", [check])


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (f32(1, 2), f32(1, 2.0001), None),
        (f32(1, 2), f32(1, 2.001), "1 of 2 elements differ, first at [1]: 2.0 becomes 2.00"),
        (f32(1e-6, 2), f32(2e-6, 2), None),  # small beside the largest
        (f32(np.nan, np.inf), f32(np.nan, np.inf), None),
        (f32(np.nan), f32(0), "first at [0]: nan becomes 0.0"),
        (f32(0), f32(np.nan), "first at [0]: 0.0 becomes nan"),
        (f32(1), f32(np.inf), "1.0 becomes inf"),
        (f32(np.inf), f32(-np.inf), "inf becomes -inf"),
        (f32(1), f32(1)[None], "float32[1] becomes float32[1, 1]"),
        (f32(1), np.array([1], np.float16), "float32[1] becomes float16[1]"),
        (np.array([1000000], np.int32), np.array([1000001], np.int32), "1000000 becomes 1000001"),
        (np.array([7], ml_dtypes.int4), np.array([6], ml_dtypes.int4), "7 becomes 6"),
        (np.array([True], np.bool_), np.array([False], np.bool_), "True becomes False"),
        (f32(), f32(), None),
    ],
)
def test_comparison(before: np.ndarray, after: np.ndarray, difference: str | None) -> None:
    found = compare(before, after, 1e-4)
    assert (found is None) if difference is None else (found is not None and difference in found)


def test_sizes_and_inputs() -> None:
    module = parse_module("""module @m dims(B=4:4:8, S=1:1:2, Q=0:9:9) {
      func @f(%ids: i32[B, S], %m: bool[Q], %h: bf16[2*B]) -> (i32[B, S]) { return %ids } }""")
    sizes = small_sizes(module)
    assert sizes == {"B": 4, "S": 2, "Q": 4}
    inputs = random_inputs(module, sizes)
    assert {n: (str(a.dtype), a.shape) for n, a in inputs.items()} == {
        "ids": ("int32", (4, 2)),
        "m": ("bool", (4,)),
        "h": ("bfloat16", (8,)),
    }
    assert np.array_equal(inputs["ids"], random_inputs(module, sizes)["ids"])
    with pytest.raises(Error, match="has no size"):
        random_inputs(module, {"B": 1})


def test_given_sizes_and_inputs_are_used() -> None:
    seen: list[dict[str, np.ndarray]] = []

    def note(module: Module, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        seen.append(dict(inputs))
        return {}

    ones = np.ones((4, 4), np.float32)
    run_pipeline(parse_module(TEXT), "cse", [CheckNumerics(note, {"B": 4}, {"y": ones})])
    assert len(seen) == 2 and seen[0]["x"].shape == (4, 4) and seen[1]["y"] is ones
