"""`irc reduce` finds modules of few operations that still fail, in few runs."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

import irc
import irc.passes
from irc.debug import checks
from irc.debug.reduce import Candidate, reduce_module, size_of
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.testing.draw import Draw, random_graph
from irc.text.printer import print_module
from tests.cli.runner import irc as command
from tests.cli.runner import refused, works
from tests.fresh import fresh

assert irc.passes
MESH = 'shard{mesh="tp=2"}'


class Failing:
    """Fails where an operation of one name uses the result of one of another; counts its calls."""

    def __init__(self, module: Module) -> None:
        pairs = [
            (v.producer.opname, op.opname) for op in module.main for v in op.operands if v.producer
        ]
        pairs = [pair for pair in pairs if pair[1] != "return"]
        self.pair, self.runs = pairs[int(fresh(1).integers(len(pairs)))], 0

    def __call__(self, candidate: Candidate) -> bool:
        self.runs += 1
        assert str(irc.parse(candidate.text)) == str(candidate.module)
        return self.holds(candidate.module)

    def holds(self, module: Module) -> bool:
        used = [(op, v.producer) for op in module.main for v in op.operands if v.producer]
        return any((made.opname, op.opname) == self.pair for op, made in used)


def passed(passes: str, number: int) -> Module:
    """A random module behind passes, which refuse to cut a block of a quantized weight."""
    for attempt in range(20):
        module = Draw(int(fresh(20 * number + attempt).integers(1 << 30)), steps=30).module
        with suppress(irc.Error):
            irc.run_passes(module, passes)
            return module
    raise AssertionError(f"{passes}: refused 20 random modules")


@pytest.mark.parametrize("passes", ["", MESH, f"{MESH}, localize"])
def test_two_operations_are_left_of_a_random_module(passes: str) -> None:
    for number in range(2):
        module = passed(passes, number)
        failing = Failing(module)
        small = reduce_module(module, failing)
        verify(small)
        most = 5 if passes else 3  # sums over ranks are completed
        assert failing.holds(small) and size_of(small) <= most, f"{failing.pair}\n{small}"
        assert failing.runs <= 120 and len(small.main.returned) == 1


def test_a_thousand_operations_take_a_few_hundred_runs() -> None:
    module = random_graph(int(fresh(2).integers(1 << 30)), "f64")
    module = Draw(int(fresh(2).integers(1 << 30)), steps=1000, experts=False).module
    failing = Failing(module)
    assert size_of(reduce_module(module, failing)) <= 3 and failing.runs <= 300


def test_operations_far_apart_are_kept() -> None:
    module = Draw(7, steps=60).module
    ops = [op.opname for op in module.main][:-1]
    rare = sorted({name for name in ops if ops.count(name) == 1})[:3]

    def fails(candidate: Candidate) -> bool:
        return {*rare} <= {op.opname for op in candidate.module.main}

    assert sorted(op.opname for op in reduce_module(module, fails).main)[:-1] == rare


def test_new_arguments_say_what_they_hold() -> None:
    module, values = Draw(11, steps=20).module, dict[str, tuple[str, str]]()
    last = [module]

    def fails(candidate: Candidate) -> bool:
        if not any(op.opname == "linear" for op in candidate.module.main):
            return False
        ops = list(last[0].main)
        for name, (number, index) in candidate.arguments.items():
            result = ops[number].results[index]
            values[name] = (str(result.type), str(candidate.module.main.arg(name).type))
        last[0] = irc.parse(candidate.text)
        return True

    reduce_module(module, fails)
    assert values and all(old == new for old, new in values.values())


TEXT = """module @m dims(B=2:4:8) {
  file @f = "w.safetensors"
  weight @w : f32[4, 4] = @f["w"]
  weight @unused : f32[4] = @f["u"]
  func @other(%x: f32[B, 4]) -> (f32[B, 4]) { %a = exp %x : f32[B, 4] return %a }
  func @inner(%x: f32[B, 4]) -> (f32[B, 4]) {
    %a = abs %x : f32[B, 4]
    %b = linear %a, @w : f32[B, 4]
    return %b
  }
  func @forward(%x: f32[B, 4], %k: f32[B, 4]) -> (y: f32[B, 4], k: f32[B, 4] aliases %k) {
    %dead = tanh %x : f32[B, 4]
    %c = call %x {callee=@inner} : f32[B, 4]
    %d = add %c, %k : f32[B, 4]
    return %c, %d
  }
}"""


def test_calls_files_and_what_nothing_uses_go() -> None:
    def fails_at(name: str) -> str:
        return str(
            reduce_module(
                irc.parse(TEXT), lambda c: any(op.opname == name for op in c.module.ops())
            )
        )

    linear = fails_at("linear")
    assert linear == irc.parse(linear).__str__() and "f32[B, 4]" in linear
    for gone in ("call", "abs", "@other", "aliases", "@unused"):
        assert gone not in linear
    assert "%dead = tanh %x" in fails_at("tanh") and "return %dead" in fails_at("tanh")
    assert "callee=@inner" in fails_at("call")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a module of 30 operations, in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.irc"
    path.write_text(print_module(random_graph(3), locs=True))
    return path


def test_the_command(place: Path) -> None:
    before = place.read_text()
    keep = "if grep -q ' = add ' {}; then echo bad add; exit 3; fi; exit 1"
    answer = works("reduce", place, "--keep", keep)
    assert "-> 1 operations in " in answer.out and "something else" not in answer.out
    small = irc.parse(Path("model.reduced.irc").read_text())
    assert [op.opname for op in small.main] == ["add", "return"] and place.read_text() == before
    both = "grep -oE '= (mul|linear) ' {}; exit 1"
    works("reduce", place, "--keep", both, "--message", "= linear", "-o", "out.irc")
    assert [op.opname for op in irc.parse(Path("out.irc").read_text()).main][:-1] == ["linear"]


def test_other_failures_with_the_same_status_are_told(place: Path) -> None:
    keep = "grep -oE ' = [a-z]+ ' {} | tail -1; exit 1"
    answer = works("reduce", place, "--keep", keep)
    assert re.search(
        r"prints something else than at first \('.*'\): '.*'; see --message", answer.out
    )
    keep = "echo 'the same of' {}; exit 1"
    assert "something else" not in works("reduce", place, "--keep", keep, "-o", "b.irc").out


@pytest.mark.parametrize("status", [126, 127])
def test_a_status_of_the_shell_is_another_one_later(place: Path, status: int) -> None:
    keep = f"grep -q ' = add ' {{}} && exit 3; exit {status}"
    assert "-> 1 operations in " in works("reduce", place, "--keep", keep).out


@pytest.mark.parametrize("name", ["{}", '"{}"', "'{}'"])
def test_the_temporary_folder_may_have_a_space(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.parent / "a $b"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert checks.Command(f"test -f {name} && grep -c module {name}").run("module") == (
        0,
        "1\n",
        "1",
    )


def test_what_cannot_be_reduced_is_refused(place: Path) -> None:
    fails = ("--keep", "grep -q nothing {}")
    assert "succeeds on" in refused("reduce", place, "--keep", "test -s {}")
    assert "does not print 'lost'" in refused("reduce", place, *fails, "--message", "lost")
    assert "would replace" in refused("reduce", place, *fails, "-o", "model.irc")
    assert "has no {}" in refused("reduce", place, "--keep", "false")
    assert "cannot be run" in refused("reduce", place, "--keep", "no-such-command {}")
    assert "cannot read" in refused("reduce", "none.irc", *fails)
    assert not Path("model.reduced.irc").exists()
    Path("model.reduced.irc").write_text("mine")
    assert "exists already" in refused("reduce", place, *fails)
    assert Path("model.reduced.irc").read_text() == "mine"
    given = works("reduce", place, *fails, "-o", "model.reduced.irc")
    assert "-> 1 operations" in given.out and not [*Path().glob(".*")]
    empty = works("reduce", "-", *fails, stdin="module @m { func @f() -> () { return } }")
    assert "0 -> 0 operations in 1 runs" in empty.out


def test_an_interrupted_search_leaves_the_smallest_module(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def run(command: checks.Command, module: str) -> tuple[int, str, str]:
        runs.append(module)
        if len(runs) == 6:
            raise KeyboardInterrupt
        return 1, "", ""

    monkeypatch.setattr(checks.Command, "run", run)
    answer = command("reduce", place, "--keep", "{}")
    assert answer.status == 130 and "model.reduced.irc" in answer.err
    assert Path("model.reduced.irc").read_text() == runs[-2]
