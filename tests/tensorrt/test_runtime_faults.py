"""What must not be served: wrong GPUs, versions, damaged files, collectives or numbers that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.tensorrt.runtime import load
from irc.backends.tensorrt.runtime.groups import Groups
from irc.errors import Error
from tests.sharded.models import MODELS
from tests.tensorrt.runtime_engine import Driver
from tests.tensorrt.runtime_world import World, write, write_engine

Facts = dict[str, Any]


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return write(tmp_path, MODELS["gqa"](), "", weights="outside")


def loaded(folder: Path, facts: Facts, prepare: Callable[[Driver], None] | None = None) -> World:
    return World(folder, facts, prepare or (lambda driver: None))


def refused(folder: Path, facts: Facts, says: str, **changes: Any) -> None:
    """Loading fails with this sentence; `changes` are those of the driver."""

    def change(driver: Driver) -> None:
        for name, value in changes.items():
            setattr(driver, name, value)

    with pytest.raises(Error, match=says):
        loaded(folder, facts, change)


def test_a_gpu_that_the_engines_are_not_for(tmp_path: Path, facts: Facts) -> None:
    from irc.backends.tensorrt.runtime.driver import Gpu

    gpu = Gpu("NVIDIA H200", 90, "x", 1 << 40)
    refused(tmp_path, facts, "sm_80, sm_86, sm_89, sm_120, and this GPU is sm_90", gpu=gpu)


def test_another_version_of_the_library(tmp_path: Path, facts: Facts) -> None:
    refused(tmp_path, facts, r"1\.7\.1\.116, and 1\.8\.0\.1 is installed", library=(1, 8, 0, 1))


def test_an_engine_of_another_version(tmp_path: Path, facts: Facts) -> None:
    write_engine(tmp_path / "stage0.engine", version=(1, 6, 1, 120))
    refused(tmp_path, facts, r"was built by TensorRT-RTX 1\.6\.1\.120")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-5], "is damaged: it has"),
        (lambda data: data[:40], "ends within its header"),
        (lambda data: b"\0" * 8 + data[8:], "begins with other bytes"),
        (lambda data: data[:80] + b"\0" * (len(data) - 80), "cannot read"),
    ],
    ids=["cut off", "of a few bytes", "of zeros", "of another kind"],
)
def test_a_damaged_engine(
    change: Callable[[bytes], bytes], says: str, tmp_path: Path, facts: Facts
) -> None:
    path = tmp_path / "stage0.engine"
    path.write_bytes(change(path.read_bytes()))
    refused(tmp_path, facts, says)


def test_an_engine_that_is_gone(tmp_path: Path, facts: Facts) -> None:
    (tmp_path / "stage0.engine").unlink()
    refused(tmp_path, facts, "cannot read the engine .*stage0.engine")


def test_no_engine_was_built(tmp_path: Path, facts: Facts) -> None:
    facts["ranks"][0]["engine"] = None
    with pytest.raises(Error, match="Build them where it is: irc compile"):
        load(tmp_path, facts, driver=lambda number: None)


def test_a_damaged_manifest(tmp_path: Path, facts: Facts) -> None:
    del facts["stages"][0]["profiles"]
    with pytest.raises(Error, match=r"does not say how rank 0 runs .*profiles.*compile again"):
        load(tmp_path, facts, driver=lambda number: None)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is damaged"), ('{"w": {}}', "is damaged"), ("[]", "is damaged"), (None, "cannot read")],
)
def test_damaged_bindings(text: str | None, says: str, tmp_path: Path, facts: Facts) -> None:
    path = tmp_path / "rank0.bindings.json"
    path.unlink() if text is None else path.write_text(text)
    refused(tmp_path, facts, says)


def test_bindings_of_another_engine(tmp_path: Path, facts: Facts) -> None:
    path = tmp_path / "rank0.bindings.json"
    found = json.loads(path.read_text())
    name = next(iter(found))
    found[name]["shape"][0] += 1
    path.write_text(json.dumps(found))
    refused(tmp_path, facts, f"the engine's input {name} is f32")
    del found[name]
    path.write_text(json.dumps(found))
    refused(tmp_path, facts, f"has an input {name} that nothing gives")


def test_a_short_weight_file(tmp_path: Path, facts: Facts) -> None:
    path = tmp_path / "rank0.weights"
    assert path.is_file()
    path.write_bytes(path.read_bytes()[:-64])
    refused(tmp_path, facts, "it is not the file that was compiled")
    path.unlink()
    refused(tmp_path, facts, "cannot read the weight file")


def test_too_little_memory(tmp_path: Path, facts: Facts) -> None:
    def shrink(driver: Driver) -> None:
        driver.memory.total = 1000

    with pytest.raises(Error, match=r"the weights of this rank take .* GB, and Fake 9000 has"):
        loaded(tmp_path, facts, shrink)


def test_a_profile_that_the_engine_lacks(tmp_path: Path, facts: Facts) -> None:
    own = json.loads((tmp_path / "rank0.bindings.json").read_text())
    write_engine(tmp_path / "stage0.engine", weights=own, profiles=1)
    refused(tmp_path, facts, "has 1 profiles, and the manifest says 2")


def test_unknown_options_and_missing_processes(tmp_path: Path, facts: Facts) -> None:
    with pytest.raises(Error, match=r"no option graph; did you mean .graphs"):
        load(tmp_path, facts, graph=False)
    facts["ranks"] *= 2
    with pytest.raises(Error, match=r"has 2 ranks, .* irc generate .* --ranks 2"):
        load(tmp_path, facts)


def test_plugins_that_are_not_here(tmp_path: Path, facts: Facts) -> None:
    facts["plugins"] = {"IrcCollective": "7"}
    with pytest.raises(Error, match="IrcCollective"):
        load(tmp_path, facts, driver=lambda number: None)


def test_sizes_that_no_profile_takes(tmp_path: Path, facts: Facts) -> None:
    world = loaded(tmp_path, facts)
    program = world.programs[0]
    ids = np.zeros((9, 1), np.int32)
    step = {
        "input_ids": ids,
        "positions": ids,
        "past_lengths": ids[:, 0],
        "logit_positions": ids,
    }
    with pytest.raises(Error, match=r"prefill: .*B=9 and must have 1 to 8.*wider --dims"):
        program.open({"B": 9}).step(step)
    with pytest.raises(Error, match="opened for B=2, but these inputs have B=9"):
        program.open({"B": 2}).step(step)
    few = {name: array[:1] for name, array in step.items()}
    few["past_lengths"] = np.array([32], np.int32)
    with pytest.raises(Error, match=r"up to position 33, but they have room for 32"):
        program.open({"B": 1}).step(few)
    with pytest.raises(Error, match="k0 is a state that the stream keeps"):
        program.open({"B": 1}).step({**few, "k0": ids})
    world.close()


def spoiled(fault: str, label: str) -> Callable[[Driver], None]:
    def change(driver: Driver) -> None:
        driver.faults[label] = fault

    return change


@pytest.mark.parametrize(
    ("mesh", "fault", "label", "says"),
    [
        ("tp=2", "nothing", "all ranks", r"all_reduce of all ranks \(ranks 0, 1\).*did nothing"),
        ("tp=3", "order", "all ranks", r"all_gather of all ranks .* order \[2, 1, 0\]"),
        ("tp=2,pp=2", "nothing", "the group tp", r"all_reduce of group tp .*did nothing"),
        ("tp=2,pp=2", "order", "the group tp", r"all_gather of group tp \(ranks [02], [13]\)"),
    ],
)
def test_collectives_that_lie(mesh: str, fault: str, label: str, says: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), mesh)
    with pytest.raises(Error, match=f"self-test: {says}.*is not served") as caught:
        World(tmp_path, facts, spoiled(fault, label))
    assert "on rank " in str(caught.value)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=2,pp=2"])
def test_collectives_of_engines_that_do_nothing(mesh: str, tmp_path: Path) -> None:
    """Those of NCCL are right, and nothing but the engine's own tell."""
    facts = write(tmp_path, MODELS["gqa"](), mesh, collectives="native", self_test=False)

    def dead(driver: Driver) -> None:
        driver.does_nothing = True

    says = r"all_reduce of TensorRT itself \(ranks \d, \d.*on rank \d, did nothing"
    with pytest.raises(Error, match=says):
        World(tmp_path, facts, dead)
    World(tmp_path, facts, dead, self_test=False).close()
    World(tmp_path, facts).close()


def test_a_wrong_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "dp=2,tp=2")
    made = Groups.__init__

    def all_in_one(self: Groups, plan: Any, driver: Any, host: Any) -> None:
        made(self, plan, driver, host)
        self.named = dict.fromkeys(self.named, self.world)

    monkeypatch.setattr(Groups, "__init__", all_in_one)
    with pytest.raises(Error, match=r"all_reduce of group tp \(ranks ., .\), on rank ., is wrong"):
        World(tmp_path, facts)


def test_numbers_that_are_wrong_on_one_rank(tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "tp=2")

    def skew(driver: Driver) -> None:
        driver.skew = 0.5 * driver.number

    with pytest.raises(Error, match=r"self-test: the first token's logits of rank 1 differ"):
        World(tmp_path, facts, skew)
    World(tmp_path, facts, skew, self_test=False).close()


def test_a_number_that_is_none(tmp_path: Path, facts: Facts) -> None:
    refused(tmp_path, facts, "self-test: the first token's logits of rank 0", skew=float("nan"))


def test_a_communicator_that_the_engine_does_not_take(tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), "tp=2", collectives="native")

    def refuse(driver: Driver) -> None:
        driver.can_bind = False

    with pytest.raises(Error, match=r"set_communicator failed.*--collectives plugin"):
        World(tmp_path, facts, refuse, self_test=False)


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    from dataclasses import replace

    facts = write(tmp_path, MODELS["gqa"](), "tp=2")

    def one(driver: Driver) -> None:
        driver.gpu = replace(driver.gpu, identity="the same")

    with pytest.raises(Error, match=r"ranks 0 and 1 use the same GPU \(Fake 9000\)"):
        World(tmp_path, facts, one)


def test_processes_that_do_not_fit(tmp_path: Path) -> None:
    from irc.backends.onnxruntime.threads import ThreadWorld

    facts = write(tmp_path, MODELS["gqa"](), "tp=2")
    host = ThreadWorld(3).communicator(0)
    with pytest.raises(Error, match="has 2 ranks, and 3 processes run it"):
        load(tmp_path, facts, communicator=host, driver=lambda number: None)


def test_the_gpu_of_a_rank() -> None:
    from types import SimpleNamespace

    from irc.backends.tensorrt.runtime.load import _local

    homes = [SimpleNamespace(host=host) for host in ("a", "a", "b", "a", "b")]
    found = [_local(SimpleNamespace(rank=rank, homes=homes)) for rank in range(5)]  # type: ignore[arg-type]
    assert found == [0, 1, 0, 2, 1]
    assert _local(None) == 0


def test_values_that_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tensorrt.runtime_gpu import Group as FakeGroup

    facts = write(tmp_path, MODELS["gqa"](), "pp=2")
    monkeypatch.setattr(FakeGroup, "receive", lambda *arguments: None)
    monkeypatch.setattr(FakeGroup, "send", lambda *arguments: None)
    with pytest.raises(Error, match="what rank 0 hands over does not reach rank 1"):
        World(tmp_path, facts)


def test_no_gpu_and_no_library(
    tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irc.backends.tensorrt.builder import library
    from irc.backends.tensorrt.runtime import gpu

    facts["target"] = "tensorrt-11.4/sm_90"
    if not library.installed("tensorrt"):
        with pytest.raises(Error, match=r"pip install 'irc-compiler\[tensorrt\]'"):
            load(tmp_path, facts)
    facts["target"] = "tensorrt-rtx-1.7/sm_89"
    if library.installed("tensorrt-rtx"):
        monkeypatch.setattr(gpu, "device_count", lambda: 0)
        with pytest.raises(Error, match="finds no GPU here"):
            load(tmp_path, facts)
