"""Choices of kernels by their times on a GPU that counts, and the file that keeps them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from irc.backends.cuda import tuning
from irc.backends.cuda.driver import Gpu as DeviceGpu
from irc.backends.cuda.execute import kernel_times
from irc.backends.cuda.plan import Kernel, Launch, Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.tuning import Choices, fastest, shipped
from irc.ir.core import Module
from irc.text import parse_module
from tests.cli.runner import refused, works

TEXT = """
module @m dims(B=1:2:16) {
  file @c = "c"
  weight @gate : bf16[1024, 2048] = @c["gate"]
  weight @up : bf16[1024, 2048] = @c["up"]
  weight @down : bf16[2048, 1024] = @c["down"]
  func @main(%x: bf16[B, 2048]) -> (bf16[B, 2048]) {
    %g = linear %x, @gate : bf16[B, 1024]
    %s = silu %g : bf16[B, 1024]
    %u = linear %x, @up : bf16[B, 1024]
    %m = mul %s, %u : bf16[B, 1024]
    %y = linear %m, @down : bf16[B, 2048]
    return %y
  }
}
"""
A_GPU = DeviceGpu("a GPU", 90, "0", 1 << 37)
KEYS = ["linear bf16 x bf16 [1024, 2048] gated, 1 rows", "linear bf16 x bf16 [2048, 1024], 1 rows"]


@pytest.fixture(autouse=True)
def own_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of this test, and the rules of irc alone."""
    monkeypatch.setenv("IRC_CACHE", str(tmp_path / "cache"))
    before = tuning.used()
    tuning.use({})
    yield
    tuning.use(before)


def module() -> Module:
    return parse_module(TEXT, "m")


def plan(rows: int = 1) -> Plan:
    return Planner(module()).plan({"B": rows})


def blocks(found: Plan) -> list[int]:
    return [step.block for step in found.steps if isinstance(step, Launch)]


class Gpu:
    """Kernels whose microseconds are given by their threads; memory is what is allocated."""

    def __init__(self, us: Callable[[int], float]) -> None:
        self.us, self.now, self.handle = us, 0.0, 0
        self.kernels: Any = self
        self.driver: Any = self
        self.gpu = A_GPU
        self.held: dict[int, int] = {}
        self.names: set[str] = set()
        self.positions: set[int] = set()
        self.early: list[bool] = []

    def free_memory(self) -> int:
        return 16 << 30

    def allocate(self, size: int) -> int:
        address = 256 + max((at + each for at, each in self.held.items()), default=0) // 256 * 256
        self.held[address] = size
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def load(self, kernels: Any) -> None:
        self.names |= {kernel.name for kernel in kernels}

    def bind(self, step: Launch, kernel: Kernel, values: list[int], early: bool) -> Any:
        assert kernel.name in self.names
        for given, value in zip(step.arguments, values, strict=True):
            if not isinstance(given, int):
                assert any(at <= value < at + size for at, size in self.held.items())
        self.early.append(early)

        def enqueue(stream: int) -> None:
            self.now += self.us(step.block) / 1e3

        return enqueue

    def upload(self, address: int, host: Any) -> None:
        if host.dtype == "int32":
            self.positions |= set(host.tolist())

    def zero(self, address: int, size: int, stream: int) -> None: ...

    def copy(self, target: int, source: int, size: int) -> None:
        assert any(at <= target < target + size <= at + n for at, n in self.held.items())

    def wait(self, what: str) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def launch(self, graph: Callable[[], None]) -> None:
        graph()

    def event(self) -> Any:
        at = self.now
        return SimpleNamespace(at=at, ms_until=lambda later: later.at - at)

    def drop(self, graph: object) -> None: ...


def on(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Let `irc bench kernels` use a GPU."""
    monkeypatch.setattr(kernel_times, "open_gpu", lambda index, timeout: gpu)
    monkeypatch.setattr(kernel_times, "CudaStream", lambda: gpu)


def written(tmp_path: Path) -> Path:
    path = tmp_path / "m.irc"
    path.write_text(TEXT)
    return path


def test_plans_take_the_fastest_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_rules, gpu = blocks(plan()), Gpu(lambda threads: 1.0 + abs(threads - 192))
    on(monkeypatch, gpu)
    answer = works("bench", "kernels", written(tmp_path), "--dims", "B=1", "--json").json
    assert {each["key"]: each["choice"] for each in answer["launches"]} == dict.fromkeys(
        KEYS, "one_row 6"
    )
    for each in answer["launches"]:
        assert each["us"]["one_row 6"] == pytest.approx(1.0)
        assert each["us"]["one_row 16"] == pytest.approx(321.0)
        assert each["floor_us"] > 0
    assert not gpu.held
    tuning.use_for(replace(A_GPU, name="another"))
    assert blocks(plan()) == by_rules
    tuning.use_for(A_GPU)
    assert blocks(plan()) == [192, 192] != by_rules


ATTENTION = """
module @m dims(B=1:2:16) {
  func @main(%q: bf16[B, 1, 512], %k: bf16[B, 2, 512, 128], %v: bf16[B, 2, 512, 128],
      %past: i32[B]) -> (bf16[B, 1, 512]) {
    %y = attention %q, %k, %v, past=%past {head_dim=128, causal} : bf16[B, 1, 512]
    return %y
  }
}
"""


def test_attention_takes_the_fastest_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(lambda threads: 1.0 + abs(threads - 128))
    on(monkeypatch, gpu)
    path = tmp_path / "m.irc"
    path.write_text(ATTENTION)
    planner = Planner(parse_module(ATTENTION, "m"))
    (by_rules,) = blocks(planner.plan({"B": 3}))
    assert by_rules != 128
    (found,) = works("bench", "kernels", path, "--dims", "B=3", "--json").json["launches"]
    assert found["key"].startswith("decode attention bf16, 512 features, 2 heads of 128, 3 rows")
    assert gpu.positions == {511}
    tuning.use_for(A_GPU)
    assert blocks(planner.plan({"B": 3})) == [128]


def test_a_kernel_that_is_not_clearly_faster_gives_way_to_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_rules = blocks(plan())
    on(monkeypatch, Gpu(lambda threads: 100.0 - (threads == 192)))
    out = works("bench", "kernels", written(tmp_path), "-o", tmp_path / "sm_90.json").out
    assert re.search(
        r"^linear bf16 x bf16 \[2048, 1024\], 2 rows +tiles 12x2x4 ", out, re.MULTILINE
    )
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    assert len(shipped(90)) == 4  # both launches at typical and at least sizes
    tuning.use_for(A_GPU)
    assert blocks(plan()) == by_rules
    assert not shipped(80)


def test_launches_may_start_early_behind_others_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(lambda threads: 1.0)
    on(monkeypatch, gpu)
    works("bench", "kernels", written(tmp_path), "--dims", "B=1")
    assert True in gpu.early
    assert not gpu.early[gpu.early.index(True) - 1]


def test_a_choice_that_irc_no_longer_has_is_ignored() -> None:
    by_rules = blocks(plan())
    tuning.use(dict.fromkeys(KEYS, "one_row 1000"))
    assert blocks(plan()) == by_rules


@pytest.mark.parametrize("text", ["", "[]", '{"a GPU, sm_90": {"p": 3}}'])
def test_a_damaged_file_is_ignored_with_a_warning(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tuning.file_of_user()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tuning.use_for(A_GPU)
    assert re.search(r"warning: .*choices.json is damaged.*made again", capsys.readouterr().err)
    kept = Choices(path, str(A_GPU))
    kept.known |= dict.fromkeys(KEYS, "one_row 6")
    kept.save()
    tuning.use_for(A_GPU)
    assert blocks(plan()) == [192, 192]


def test_the_shipped_choices_are_candidates() -> None:
    for key, choice in shipped(90).items():
        known = r"one_row \d+|tiles \d+x\d+x\d+|\d+ splits, \d+ warps, \d+ resident"
        assert re.fullmatch(known, choice), key


def test_wrong_words() -> None:
    assert "expected the folders of artifacts" in refused("bench", "kernels", status=2)
    assert "--runs is not for kernels" in refused("bench", "kernels", "x", "--runs", "3", status=2)
    assert "'b' behind 'a' is too much" in refused("bench", "a", "b", status=2)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("irc.backends.cuda.execute.gpu.device_count", lambda: 0)
    message = refused("bench", "kernels", written(tmp_path))
    assert "GPU" in message and "a program of plans needs one" in message


def test_fastest() -> None:
    assert fastest({"a": 3.0, "b": 2.0, "c": 1.0}) == "c"
    assert fastest({"a": float("inf"), "b": float("inf")}) == "a"
