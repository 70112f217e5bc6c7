"""`irc generate` in a process per rank without MPI: started by irc, or as torchrun and Slurm do."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.cli.place import ADDRESS, PARENT, Place, place_in_world
from tests.ports import HOST
from tests.tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SOON = 120.0  # seconds: what would never happen has not happened by then
PROMPT = ["--prompt", "Beautiful is", "--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of two ranks, on CPU."""
    folder = tmp_path_factory.mktemp("artifact")
    write_checkpoint(folder / "checkpoint")
    irc.compile(folder / "checkpoint", folder / "tp2", mesh="tp=2")
    return folder / "tp2"


Process = subprocess.Popen[str]


def started(words: list[str], variables: Mapping[str, str] | None = None) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "irc", "generate", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, **(variables or {})},
    )


def ended(process: Process) -> tuple[int, str, str]:
    """(status, output, errors); standard input stays open until then."""
    try:
        process.wait(SOON)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.stdin and process.stdout and process.stderr
    with process.stdin, process.stdout, process.stderr:
        return process.returncode, process.stdout.read(), process.stderr.read()


@pytest.fixture(scope="module")
def text(artifact: Path) -> str:
    """What threads write."""
    status, out, _ = ended(started([str(artifact), *PROMPT]))
    assert status == 0
    return out


def test_irc_starts_a_process_per_rank(artifact: Path, text: str) -> None:
    status, out, errors = ended(started([str(artifact), *PROMPT, "--ranks", "2"]))
    assert (status, out) == (0, text)
    assert errors.count("tokens of prompt") == 1


def test_the_prompt_may_come_by_standard_input(artifact: Path, text: str) -> None:
    words = [str(artifact), "--prompt", "-", *PROMPT[2:], "--launcher", "processes"]
    process = started(words)
    out, _ = process.communicate("Beautiful is\n", SOON)
    assert (process.returncode, out) == (0, text)


def test_ranks_that_the_artifact_has_not(artifact: Path) -> None:
    status, _, errors = ended(started([str(artifact), *PROMPT, "--ranks", "3"]))
    assert status == 1
    assert "was compiled for 2 ranks (the mesh is (tp=2)), not for 3; give --ranks 2" in errors


def test_an_error_of_all_ranks_is_said_once(artifact: Path) -> None:
    words = [str(artifact), "--prompt", "", "--raw-ids", "--ranks", "2"]
    status, _, errors = ended(started(words))
    assert status == 1
    assert errors.count("the prompt has no tokens") == 1


def torchrun(rank: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return place | {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}


def slurm(rank: int, port: int) -> dict[str, str]:
    place = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
    nodes = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": HOST}
    return place | nodes | {"MASTER_PORT": str(port)}


@pytest.mark.parametrize("variables", [torchrun, slurm])
def test_ranks_that_others_start(
    variables: Callable[[int, int], dict[str, str]], artifact: Path, text: str, port: int
) -> None:
    ranks = [started([str(artifact), *PROMPT], variables(rank, port)) for rank in (1, 0)]
    (_, silent, nothing), (status, out, _) = [ended(each) for each in ranks]
    assert (status, out) == (0, text)
    assert (silent, nothing) == ("", "")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_of_torchrun_that_dies(lost: int, artifact: Path, port: int) -> None:
    words = [str(artifact), "--prompt", "-"]
    ranks = [started(words, torchrun(rank, port)) for rank in (0, 1)]
    wait_until_met(ranks[0])
    ranks[lost].kill()
    status, _, errors = ended(ranks[1 - lost])
    assert status != 0
    assert f"error: rank {lost}" in errors and "died" in errors
    ended(ranks[lost])


def test_a_rank_that_torchrun_did_not_start(port: int) -> None:
    from irc.backends.processes.meeting import Address, meet
    from irc.errors import Error

    address = Address(HOST, port, b"key")
    with pytest.raises(Error, match=r"rank 1 and rank 2 did not come to rank 0 at localhost:\d+"):
        meet(address, 0, 3, patience=0.3)
    with pytest.raises(Error, match="rank 1 did not reach rank 0 at localhost"):
        meet(address, 1, 3, patience=0.3)


def children(parent: int) -> dict[int, int]:
    """The processes of the ranks that irc started."""
    found: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] not in "ZX":
            ranks = [each[9:] for each in variables if each.startswith(b"IRC_RANK=")]
            found |= {int(rank): int(name) for rank in ranks}
    return found


def wait_until(ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SOON
    while not ready():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def wait_until_met(process: Process) -> None:
    """Until rank 0 reads its prompt, half of which comes here: it does that when all have met."""
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    process.stdin.write("Beautiful")
    process.stdin.flush()
    unread = bytes(4)
    wait_until(
        lambda: process.poll() is not None or fcntl.ioctl(pipe, termios.FIONREAD, unread) == unread,
        "the ranks did not meet",
    )
    assert process.poll() is None, ended(process)


@pytest.fixture
def waiting(artifact: Path) -> Iterator[tuple[Process, dict[int, int]]]:
    """Ranks that wait for the prompt; none is left in the end."""
    process = started([str(artifact), "--prompt", "-", "--ranks", "2"])
    wait_until_met(process)
    ranks = children(process.pid)
    assert sorted(ranks) == [0, 1]
    yield process, ranks
    process.kill()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.wait()
    wait_until(lambda: not any(map(lives, ranks.values())), "a process was left behind")


def lives(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed(lost: int, waiting: tuple[Process, dict[int, int]]) -> None:
    process, ranks = waiting
    os.kill(ranks[lost], signal.SIGKILL)
    status, _, errors = ended(process)
    assert status == 1
    assert f"rank {lost} (process {ranks[lost]}" in errors and "died" in errors
    assert errors.count("error:") == 1


def test_a_rank_that_is_stopped(waiting: tuple[Process, dict[int, int]]) -> None:
    process, ranks = waiting
    os.kill(ranks[1], signal.SIGSTOP)
    status, _, errors = ended(process)
    assert status == 1
    assert "rank 1 " in errors and "its process is stopped (SIGSTOP)" in errors


def test_ctrl_c(waiting: tuple[Process, dict[int, int]]) -> None:
    process, _ = waiting
    process.send_signal(signal.SIGINT)
    status, _, errors = ended(process)
    assert status == 130
    assert errors.count("interrupted") == 1


def test_an_irc_that_is_killed(waiting: tuple[Process, dict[int, int]]) -> None:
    process, _ = waiting
    process.kill()  # the fixture sees that no rank is left


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"IRC_RANK_PIPE": "5", "IRC_RANK": "1", "IRC_RANKS": "2"}, Place(1, 2, PARENT)),
        (torchrun(1, 29500), Place(1, 2, ADDRESS)),
        (slurm(1, 29500), Place(1, 2, ADDRESS)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"SLURM_JOB_ID": "7", **{k: v for k, v in slurm(0, 1).items() if "STEP" not in k}}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **torchrun(1, 29500)}, Place(0, 2)),
    ],
)
def test_where_a_process_stands(variables: dict[str, str], place: Any) -> None:
    assert place_in_world(variables) == place
