"""`irc bench`: threads of the CPU, the topology that it writes, and GPUs that are not there."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from irc.analysis.topology_file import default_topology, read_topology
from irc.analysis.topology_fit import Measurement
from irc.artifact.manifest import Progress
from irc.backends import measure as measuring
from irc.backends.cuda import measure, runtime
from irc.backends.measure import HALF, SINGLE, Case, Plan, check, measure_threads, operand_of
from irc.backends.ranks import launch as ranks_launch
from irc.backends.ranks.launch import find_mpiexec
from irc.backends.ranks.threads import ThreadCommunicator, ThreadWorld
from irc.errors import Error
from irc.ops.collective_names import OPERATIONS
from tests.cli.runner import irc, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.tensorrt.fake_gpu import FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl

FEW = ("--sizes", "4096,1000000")


def test_threads_are_measured_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "device_count", lambda: 0)
    answer = irc("bench", "collectives", *FEW)
    assert answer.status == 0
    assert "there is no GPU here, so threads of the CPU are measured" in answer.err
    lines = answer.out.splitlines()
    assert lines[0].startswith("threads of ")
    assert lines[1].split()[:2] == ["ranks", "collective"]
    assert [line.split()[:2] for line in lines[2:]] == [["2", kind] for kind in OPERATIONS]


def timed(plan: Plan, tell: Progress) -> tuple[list[Measurement], str]:
    """What is measured, but for its times: they lie on lines, as on no real machine."""
    found, about = measure_threads(plan, tell)
    assert all(each.us > 0 for each in found)
    return [replace(m, us=20 * m.group_size + m.size / 1000) for m in found], about


def test_the_topology_has_the_fitted_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_threads", timed)
    kinds = ("--kinds", "all_gather,reduce_scatter")
    words = ("bench", "collectives", "--on", "cpu", "--ranks", "3", *FEW, *kinds)
    answer = works(*words, "-o", tmp_path / "mine.json", "--json")
    topology = read_topology(tmp_path / "mine.json")
    assert topology.within == "threads"
    link = topology.link("threads")
    assert link.source.startswith("irc bench collectives on threads")
    assert list(link.measured) == ["all_gather", "reduce_scatter"]
    assert topology.link("nvlink") == default_topology().link("nvlink")
    for found in answer.json["measurements"]:
        assert found["size"] % (4 * found["group_size"]) == 0
        model = topology.time(found["kind"], found["group_size"], found["size"])
        assert model == pytest.approx(found["us"], rel=1e-3)
    assert {found["group_size"] for found in answer.json["measurements"]} == {2, 3}


def test_a_language_model_is_timed_in_two_phases(artifact: Path, tmp_path: Path) -> None:
    found = works("bench", artifact, "--runs", "3", "--json").json["phases"]
    assert [(each["phase"], each["runs"], each["per_run"]) for each in found] == [
        ("prefill", 3, 96),
        ("decode", 3, 1),
    ]
    for each in found:
        assert 0 < each["p50_ms"] <= each["p90_ms"] <= each["p99_ms"]
        assert each["per_second"] == pytest.approx(each["per_run"] / each["mean_ms"] * 1e3)
    np.savez(tmp_path / "in.npz", input_ids=[[1, 2], [3, 4]])
    text = works("bench", artifact, "--runs", "2", "--inputs", tmp_path / "in.npz").out
    assert re.search(r"^run of 2 rows +2 .* rows/s$", text, re.MULTILINE)


def test_a_cache_without_room_for_decode_is_timed_in_prefill(
    checkpoint: Path, tmp_path: Path
) -> None:
    works("compile", checkpoint, "-o", tmp_path / "out", "--dims", "C=3")
    (found,) = works("bench", tmp_path / "out", "--json").json["phases"]
    assert (found["phase"], found["per_run"]) == ("prefill", 3)


def test_a_module_is_timed_in_numpy(module: Path) -> None:
    answer = works("bench", module, "--backend", "reference", "--runs", "2", "--json")
    (found,) = answer.json["phases"]
    assert (found["phase"], found["per_run"], found["unit"]) == ("run", 2, "rows")


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_a_wrong_result_is_noticed(kind: str, group_size: int) -> None:
    """The check is what stands between a wrong call of a library and a table of its times."""
    case = Case(kind, group_size, 120 * group_size, HALF)
    for rank in range(group_size):
        given = [operand_of(case, each) for each in range(group_size)]
        assert not any((a == b).all() for a, b in pairwise(given))
        wrong = fresh(rank).integers(-9, -1, case.result).astype(HALF)
        if kind in ("reduce", "gather") and rank:
            check(case, rank, wrong)  # undefined there
            continue
        with pytest.raises(Error, match="its time is not reported"):
            check(case, rank, wrong)


def test_a_rank_that_gets_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: object, what: object, operand: object, result: object) -> None:
        """Leaves the result as it is."""

    monkeypatch.setattr(ThreadCommunicator, "collective", nothing)
    with pytest.raises(Error, match="its time is not reported"):
        measure_threads(Plan(("all_gather",), (4096,), 2, SINGLE), lambda *_: None)


def test_sizes_divide_by_the_ranks() -> None:
    for group_size in (2, 3, 7):
        for case in Plan(OPERATIONS, (4096, 1 << 20), group_size, SINGLE).cases(group_size):
            assert case.size % (group_size * 4) == 0
            assert 4096 - 4 * group_size < case.size or case.size > 4096
            assert case.operand * 4 in (case.size, case.size // group_size)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_processes_of_mpiexec_are_measured() -> None:
    """The first one answers for all."""
    words = ["collectives", *FEW, "--kinds", "all_reduce,scatter", "--json"]
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "irc", "bench", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["about"] == "processes over MPI"
    said = [(each["kind"], each["group_size"], each["size"]) for each in found["measurements"]]
    sizes = [4096, 1000000]
    assert said == [(kind, 2, size) for kind in ("all_reduce", "scatter") for size in sizes]
    assert all(each["us"] > 0 for each in found["measurements"])


def test_gpus_are_measured_by_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], int]] = []

    def launch(words: list[str], ranks: int) -> int:
        launched.append((words, ranks))
        return 3

    monkeypatch.setattr(runtime, "device_count", lambda: 4)
    monkeypatch.setattr(ranks_launch, "launch", launch)
    assert irc("bench", "collectives", *FEW, "--ranks", "3").status == 3
    assert launched == [(["bench", "collectives", *FEW, "--ranks", "3"], 3)]


def test_the_slowest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CudaDriver", FakeDriver)
    monkeypatch.setattr(measure, "open_group", partial(measure.open_group, library=FakeNccl()))
    monkeypatch.setattr(measure, "nccl_version", lambda: "2.28.9")
    plan = Plan(OPERATIONS, (4096,), 3)
    (found, about), *others = ThreadWorld(3).run(
        lambda host: measure.measure_gpus(plan, host, lambda *_: None)
    )
    assert about == "Fake 9000, NCCL 2.28.9" and all(found == other for other, _ in others)
    expected = [(kind, size, 50.0 * size) for size in (2, 3) for kind in OPERATIONS]
    assert [(m.kind, m.group_size, m.us) for m in found] == expected
