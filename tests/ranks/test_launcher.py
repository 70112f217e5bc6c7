"""`--launcher mpi` and plain mpirun: the same results, one message, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.ranks.conftest import compiled
from tests.ranks.worlds import MPIEXEC, SOON, World, irc, needs_mpi, nothing_left, started

pytestmark = needs_mpi
ALWAYS = 1_000_000  # tokens: more than a rank writes before its failure
PROMPT = ["--prompt", "The Python", "--max-new-tokens"]


def generate(folder: Path, tokens: int = 12) -> list[str]:
    return irc("generate", folder, *PROMPT, str(tokens), "--launcher", "mpi")


def output_of(command: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    with started(command, stdin) as world:
        return world.end()


def lines(err: str) -> list[str]:
    """Lines on standard error, without the progress on a slow machine."""
    return [line for line in err.splitlines() if not line.startswith("irc: ")]


@pytest.mark.parametrize("how", ["--ranks", "--launcher", "mpirun"])
def test_processes_write_what_threads_write(how: str, two_ranks: Path, four_ranks: Path) -> None:
    folder = four_ranks if how == "--launcher" else two_ranks
    command, stdin = generate(folder), b""
    if how == "--ranks":
        command = irc("generate", folder, *PROMPT, "12", "--ranks", "2")
    if how == "mpirun":
        command = irc("generate", folder, "--prompt", "-", "--max-new-tokens", "12")
        command, stdin = [str(MPIEXEC), "-n", "2", *command], b"The Python\n"
    status, out, err = output_of(command, stdin)
    assert (status, out) == (0, works("generate", folder, *PROMPT, "12").out)
    (line,) = lines(err)  # one rank prints
    assert "12 new at " in line


def test_arrays_and_caches_are_those_of_threads(four_ranks: Path, tmp_path: Path) -> None:
    """Caches are sharded over the ranks, and in stages each rank has those of its layers."""
    states = json.loads((four_ranks / "config.json").read_text())["program"]["ports"]["states"]
    sizes: dict[Any, Any] = {"B": 1, "C": 8}
    caches = {s["name"]: np.zeros([sizes.get(n, n) for n in s["shape"]], "f4") for s in states}
    np.savez(tmp_path / "in.npz", allow_pickle=False, input_ids=np.array([[1, 2, 3]]), **caches)
    words = ["run", four_ranks, "--inputs", tmp_path / "in.npz", "--outputs"]
    works(*words, tmp_path / "threads.npz")
    status, out, err = output_of(irc(*words, tmp_path / "mpi.npz", "--launcher", "mpi"))
    assert status == 0, err
    assert "logits" in out
    with np.load(tmp_path / "threads.npz") as wanted, np.load(tmp_path / "mpi.npz") as arrays:
        assert arrays.files == wanted.files
        assert len(wanted.files) > 2
        for name in wanted.files:
            np.testing.assert_array_equal(arrays[name], wanted[name])


def test_a_prompt_of_any_kind_arrives(two_ranks: Path) -> None:
    """MPI's launcher interprets `:` itself, and omits an empty argument."""
    words = ["generate", two_ranks, "--max-new-tokens", "2", "--json", "--prompt"]
    odd = "a 'b'\n\"c\" $HOME é"
    for prompt, stdin in ((":", b""), (odd, b""), ("-", odd.encode())):
        status, out, err = output_of(irc(*words, prompt, "--launcher", "mpi"), stdin)
        assert status == 0, err
        assert json.loads(out)["prompts"][0]["prompt"] == (odd if stdin else prompt)


def programs(*commands: list[str]) -> list[str]:
    """A plain mpirun with a program per rank."""
    words = [str(MPIEXEC), "-n", "1", *commands[0]]
    for command in commands[1:]:
        words += [":", "-n", "1", *command]
    return words


def test_mistakes_are_one_sentence(two_ranks: Path, tmp_path: Path) -> None:
    words = ["generate", str(two_ranks), *PROMPT, "3"]
    relative = [f"PYTHONPATH={ROOT}", *irc("generate", two_ranks.name, *PROMPT, "3")]
    other = compiled(tmp_path / two_ranks.name, "tp=2,cp=1")
    (tmp_path / "empty").mkdir()
    here, there, elsewhere = (
        ["env", "-C", str(folder), *relative]
        for folder in (two_ranks.parent, tmp_path / "empty", other.parent)
    )
    commands = {
        "so start as many processes as that has ranks, mpirun -n 2: there are 3": [
            *(str(MPIEXEC), "-n", "3"),
            *irc(*words),
        ],
        "the ranks differ in the command: rank 0 has": programs(irc(*words), irc(*words, "--json")),
        "rank 1 failed: two does not exist": programs(here, there),
        "the ranks differ in the artifact: rank 0 has sha256:": programs(here, elsewhere),
        "the prompt has no tokens": irc(*words[:2], "--prompt", "", "--launcher", "mpi"),
        "mpirun has chosen the hosts already": programs(*[irc(*words, "--hosts", "a")] * 2),
    }
    with ExitStack() as stack:  # all at the same time
        worlds = {text: stack.enter_context(started(each)) for text, each in commands.items()}
        for sentence, world in worlds.items():
            status, out, err = world.end()
            assert (status, out.strip()) == (1, ""), (sentence, out, err)
            assert sentence in err
            assert err.count("error:") == len(lines(err)) == 1, err


def test_what_cannot_be_launched(two_ranks: Path, tmp_path: Path) -> None:
    words = ["generate", two_ranks, *PROMPT, "3"]
    assert "leave --launcher mpi out" in refused(
        *words, "--backend", "reference", "--launcher", "mpi"
    )
    assert "--hosts needs processes" in refused(*words, "--launcher", "threads", "--hosts", "a")
    assert "compiled for 2; give --ranks 2" in refused(*words, "--ranks", "3")
    assert "is none of threads, mpi" in refused(*words, "--launcher", "processes", status=2)
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    command = ["env", *(f"{name}={value}" for name, value in torchrun.items()), *irc(*words)]
    status, _, err = output_of(command)
    assert (status, err.count("error:")) == (1, 1)
    assert "torchrun started this process, and irc's ranks use MPI: mpirun -n 2 irc" in err
    missing = refused("generate", tmp_path / "no", *PROMPT, "3", "--launcher", "mpi")
    assert "does not exist; write one with: irc compile" in missing


def test_an_unknown_host_is_named(two_ranks: Path) -> None:
    """Also by ssh, where there is one, without the source locations of MPI's launcher."""
    status, _, err = output_of(
        irc("generate", two_ranks, *PROMPT, "3", "--hosts", "nohost1.invalid,nohost2.invalid")
    )
    assert status == 1
    assert "hydra" not in err and "mpiexec@" not in err
    *shown, last = err.splitlines()
    assert last.startswith("error: the ranks on nohost1.invalid, nohost2.invalid did not start")
    if shutil.which("ssh") is not None:
        assert any("Could not resolve hostname nohost" in line for line in shown)


# -- failures while the ranks run


def begun(world: World) -> dict[int, int]:
    """The processes of the ranks once text is printed."""
    until = time.monotonic() + SOON
    while not world.printed():
        assert world.process.poll() is None and time.monotonic() < until, world.end()
        time.sleep(0.02)
    return world.ranks(2)


# name -> (the rank, the signal that it gets, the message)
FAILING = {
    "first dies": (0, signal.SIGKILL, "died: its process is gone"),
    "under mpirun": (1, signal.SIGSTOP, "stalls: it has sent no heartbeat for 5 s"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_dies_or_stops_is_named(name: str, endless: Path) -> None:
    rank, number, message = FAILING[name]
    mpirun = [str(MPIEXEC), "-n", "2"] if name == "under mpirun" else []
    with started([*mpirun, *generate(endless, ALWAYS)]) as world:
        os.kill(begun(world)[rank], number)
        status, _, err = world.end()
    assert status == 1
    (line,) = lines(err)
    assert line.startswith(f"error: rank {rank} (process ")
    assert message in line


@pytest.mark.parametrize(
    ("number", "status", "shown"),
    [(signal.SIGINT, 130, "\ninterrupted\n"), (signal.SIGTERM, 143, "")],
)
def test_an_end_from_outside_ends_every_process(
    number: int, status: int, shown: str, endless: Path
) -> None:
    with started(generate(endless, ALWAYS)) as world:
        begun(world)
        world.process.send_signal(number)
        ended, _, err = world.end()
    assert (ended, lines(err)) == (status, shown.splitlines())


def test_nothing_outlives_irc(endless: Path) -> None:
    """Not even a rank that is stopped, which prints nothing, and so notices no closed pipe."""
    with started(generate(endless, ALWAYS)) as world:
        os.kill(begun(world)[1], signal.SIGSTOP)
        began = time.monotonic()
        world.process.kill()
        world.process.wait()
        assert nothing_left(world.word)
        assert time.monotonic() - began < 4, "not by the silence of the rank, after five seconds"


def test_ranks_end_when_the_output_is_closed(endless: Path) -> None:
    reading, writing = os.pipe()
    with started(generate(endless, ALWAYS), stdout=writing) as world:
        os.close(writing)
        assert os.read(reading, 1)
        os.close(reading)
        world.process.wait(SOON)
        assert nothing_left(world.word)


def test_a_terminal_sees_colours(two_ranks: Path) -> None:
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        generate(two_ranks, 2), cwd=ROOT, stdout=slave, stderr=slave,
        env=environment | {"TERM": "xterm"},
    )  # fmt: skip
    assert process.wait(timeout=SOON) == 0
    os.close(slave)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while more := os.read(master, 4096):
            shown += more
    os.close(master)
    assert b"\x1b[2mThe Python\x1b[0m" in shown


# -- results

LOOKUP = """module @m dims(B=1:3:8) {
  weight @t : f32[13, 4] = random("t", 1, 0.5, [13, 4])
  weight @u : f32[7, 4] = random("u", 1, 0.5, [7, 4])
  func @forward(%ids: i64[B, 3]) -> (y: f32[B, 3, 7]) {
    %e = embedding %ids, @t : f32[B, 3, 4]
    %n = tanh %e : f32[B, 3, 4]
    %y = linear %n, @u : f32[B, 3, 7]
    return %y
  }
}"""


def test_a_count_without_dimensions_arrives_from_the_last_stage(tmp_path: Path) -> None:
    """Two stages of two ranks count the out-of-range ids of a sharded table."""
    (tmp_path / "m.irc").write_text(LOOKUP)
    (tmp_path / "plan.txt").write_text("t 0@tp\nu 0@tp\n")
    words = ["--mesh", "pp=2,tp=2", "--plan", tmp_path / "plan.txt", "--outside", "error"]
    works("compile", tmp_path / "m.irc", "-o", tmp_path / "out", *words)
    words = ["--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"]
    command = irc("run", tmp_path / "out", *words, "--launcher", "mpi")
    ids = fresh(1).integers(0, 13, (5, 3))
    np.savez(tmp_path / "in.npz", ids=ids)
    status, _, err = output_of(command)
    assert status == 0, err
    with np.load(tmp_path / "out.npz") as found:
        wanted = evaluate(parse_module(LOOKUP), {"ids": ids})["y"]
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-6)
    ids[[0, 2, 4], 1] = 13, -1, 99
    np.savez(tmp_path / "in.npz", ids=ids)
    status, _, err = output_of(command)
    assert (status, err.count("indices from the input ids are out of range (3 of them)")) == (1, 1)
