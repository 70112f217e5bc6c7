"""Errors at load: wrong GPUs, versions, damaged files, wrong collectives or numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.execute import gpu as runtime_gpu
from irc.backends.cuda.execute.gpu_rank import GpuRank
from irc.backends.cuda.group import Group
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.tensorrt.builder import library
from irc.backends.tensorrt.runtime import load
from irc.errors import Error
from tests.sharded.models import MODELS
from tests.tensorrt.fake_gpu import STREAMS
from tests.tensorrt.runtime_world import FakeRank, World, write, write_engine

Facts = dict[str, Any]
ENGINE, BINDINGS, WEIGHTS = "stage0.engine", "rank0.bindings.json", "rank0.weights"


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return write(tmp_path, MODELS["gqa"](), "", weights="outside")


def setting(**values: Any) -> Callable[[FakeRank], None]:
    """Sets attributes of a rank's parts: `gpu_...`, `library_...`, and those of TensorRT."""

    def change(rank: FakeRank) -> None:
        for name, value in values.items():
            part, _, field = name.partition("_")
            if part == "gpu":
                rank.driver.gpu = replace(rank.driver.gpu, **{field: value})
            elif part == "library":
                rank.library = replace(rank.library, **{field: value})
            elif part == "memory":
                rank.driver.memory.total = value
            elif part == "fault":
                rank.faults[value[0]] = value[1]
            else:
                setattr(rank.trt, name, value(rank.rank) if callable(value) else value)

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_capability": 90}, "sm_80, sm_86, sm_89, sm_120, and this GPU is .*sm_90"),
        ({"library_version": "1.8.0.1"}, r"by tensorrt-rtx 1\.7, and 1\.8\.0\.1 is installed"),
        ({"memory_total": 1000}, r"\(weights .* free on Fake 9000"),
        ({"skew": float("nan")}, "self-test: the first token's logits of rank 0"),
    ],
)
def test_a_machine_that_does_not_fit(
    changes: dict[str, Any], message: str, tmp_path: Path, facts: Facts
) -> None:
    with pytest.raises(Error, match=message):
        World(tmp_path, facts, setting(**changes))


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Facts], None]:
    """Changes the bytes of a file."""

    def work(folder: Path, facts: Facts) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return work


def removed(name: str) -> Callable[[Path, Facts], None]:
    return lambda folder, facts: (folder / name).unlink()


def of_facts(change: Callable[[Facts], Any]) -> Callable[[Path, Facts], None]:
    return lambda folder, facts: change(facts)


def with_one_profile(folder: Path, facts: Facts) -> None:
    own = json.loads((folder / BINDINGS).read_text())
    write_engine(folder / ENGINE, weights=own, profiles=1)


def with_other_weights(change: Callable[[dict[str, Any], str], Any]) -> Any:
    """Changes the binding of the first weight."""

    def work(data: bytes) -> bytes:
        found = json.loads(data)
        change(found, next(iter(found)))
        return json.dumps(found).encode()

    return edited(BINDINGS, work)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(ENGINE, lambda data: b""), "cannot read the engine .*: cannot mmap an empty file"),
        (
            edited(ENGINE, lambda data: data[:-5]),
            r"cannot read .*; it is damaged, .* compile again \(MALFORMED_ENGINE\)",
        ),
        (removed(ENGINE), "cannot read the engine .*stage0.engine"),
        (with_one_profile, "number of profiles is 2, and the engine says 1"),
        (
            of_facts(lambda facts: facts["ranks"][0].update(engine=None)),
            "build them where tensorrt-rtx is installed: irc compile",
        ),
        (
            of_facts(lambda facts: facts["stages"][0].pop("profiles")),
            r"contradicts itself .*profiles.*compile again",
        ),
        (of_facts(lambda facts: facts.update(plugins={"IrcCollective": "7"})), "IrcCollective"),
        (edited(BINDINGS, lambda data: b"{"), "is damaged"),
        (edited(BINDINGS, lambda data: b'{"w": {}}'), "is damaged"),
        (edited(BINDINGS, lambda data: b"[]"), "is damaged"),
        (removed(BINDINGS), "cannot read"),
        (
            with_other_weights(lambda found, name: found[name].update(shape=[1])),
            r"is input f32\[1\], and the engine says input f32",
        ),
        (with_other_weights(dict.pop), "is none, and the engine says input f32"),
        (edited(WEIGHTS, lambda data: data[:-64]), "it is not the file that was compiled"),
        (removed(WEIGHTS), "cannot read the weight file"),
    ],
)
def test_a_damaged_artifact(
    damage: Callable[[Path, Facts], None], message: str, tmp_path: Path, facts: Facts
) -> None:
    damage(tmp_path, facts)
    with pytest.raises(Error, match=message):
        World(tmp_path, facts)


def test_unknown_options_and_missing_processes(tmp_path: Path, facts: Facts) -> None:
    with pytest.raises(Error, match=r"no option graph; did you mean .graphs"):
        load(tmp_path, facts, graph=False)
    facts["ranks"] *= 2
    with pytest.raises(Error, match=r"has 2 ranks, .* irc generate .* --ranks 2"):
        load(tmp_path, facts)
    with pytest.raises(Error, match="has 2 ranks, and 3 processes run it"):
        load(tmp_path, facts, communicator=ThreadWorld(3).communicator(0))


def test_sizes_that_no_profile_accepts(tmp_path: Path, facts: Facts) -> None:
    world = World(tmp_path, facts)
    program = world.programs[0]
    ids = np.zeros((9, 1), np.int32)
    step = {"input_ids": ids, "positions": ids, "past_lengths": ids[:, 0], "logit_positions": ids}
    few = {name: array[:1] for name, array in step.items()}
    few["past_lengths"] = np.array([32], np.int32)
    for rows, inputs, message in (
        (9, step, r"prefill: .*B=9 and must have 1 to 8.*wider --dims"),
        (2, step, "opened for B=2, but these inputs have B=9"),
        (1, few, r"up to position 33, and their capacity is 32"),
        (1, {**few, "k0": ids}, "k0 is a state that the stream keeps"),
    ):
        with pytest.raises(Error, match=message):
            program.open({"B": rows}).step(inputs)
    world.close()


@pytest.mark.parametrize(
    ("mesh", "fault", "label", "message"),
    [
        ("tp=2", "nothing", "all ranks", r"all_reduce of all ranks \(ranks 0, 1\).*did nothing"),
        ("tp=3", "order", "all ranks", r"all_gather of all ranks .* order \[2, 1, 0\]"),
        ("tp=2,pp=2", "nothing", "the group tp", r"all_reduce of group tp .*did nothing"),
        ("tp=2,pp=2", "order", "the group tp", r"all_gather of group tp \(ranks [02], [13]\)"),
    ],
)
def test_wrong_collectives(mesh: str, fault: str, label: str, message: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), mesh)
    with pytest.raises(Error, match=f"self-test: {message}.*refusing to load") as caught:
        World(tmp_path, facts, setting(fault_=(label, fault)))
    assert "on rank " in str(caught.value)


def test_a_wrong_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "dp=2,tp=2")
    monkeypatch.setattr(GpuRank, "group", lambda rank, axes: rank.world)
    with pytest.raises(Error, match=r"all_reduce of group tp \(ranks ., .\), on rank ., is wrong"):
        World(tmp_path, facts)


def test_loading_that_fails_holds_nothing(tmp_path: Path, facts: Facts) -> None:
    ranks: list[FakeRank] = []

    def wrong(rank: FakeRank) -> None:
        ranks.append(rank)
        rank.trt.skew = float("nan")

    with pytest.raises(Error, match="self-test"):
        World(tmp_path, facts, wrong)
    (driver,) = (rank.driver for rank in ranks)
    assert driver.memory.used == 0
    assert not [stream for stream in STREAMS.values() if stream.driver is driver]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skew": lambda rank: 0.5 * rank}, "first token's logits of rank 1 differ"),
        ({"gpu_uuid": "same"}, r"ranks 0 and 1 use the same GPU \(Fake 9000\)"),
    ],
)
def test_a_rank_that_is_wrong(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "tp=2")
    with pytest.raises(Error, match=message):
        World(tmp_path, facts, setting(**changes))
    if "skew" in changes:
        World(tmp_path, facts, setting(**changes), self_test=False).close()


def test_values_that_are_not_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "pp=2")
    monkeypatch.setattr(Group, "receive", lambda *arguments: None)
    monkeypatch.setattr(Group, "send", lambda *arguments: None)
    with pytest.raises(Error, match="expected rank 1 to receive the number of rank 0"):
        World(tmp_path, facts)


def test_no_gpu_and_no_library(
    tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts["target"] = "tensorrt-11.4/sm_90"
    if not library.installed("tensorrt"):
        with pytest.raises(Error, match=r"pip install '\.\[tensorrt\]'"):
            load(tmp_path, facts)
    facts["target"] = "tensorrt-rtx-1.7/sm_89"
    if library.installed("tensorrt-rtx"):
        monkeypatch.setattr(runtime_gpu, "driver_version", lambda: 13000)
        monkeypatch.setattr(runtime_gpu, "device_count", lambda: 0)
        with pytest.raises(Error, match="finds no GPU here"):
            load(tmp_path, facts)
