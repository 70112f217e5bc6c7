"""What all commands share: help, wrong usage, exit statuses, internal failures."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from irc import __version__, backends
from irc.cli.main import COMMANDS
from irc.cli.ranks import Process
from irc.errors import Error
from irc.ir.core import Module
from irc.text import parse_module
from tests.cli.conftest import MODULE
from tests.cli.runner import PROGRAM, irc, refused, works
from tests.layout import ROOT, project

# the environment without unbuffered output
BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


def test_the_help_lists_commands_and_backends() -> None:
    text = works("--help").out
    assert works("-h").out == works("help").out == text
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE), name
    for each in (text, works("compile", "--help").out):
        assert all(re.search(rf"\b{name}\b", each) for name in backends.names())
    assert "usage: irc COMMAND" in refused(status=2)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_valid_examples(name: str) -> None:
    text = works(name, "--help").out
    assert works("help", name).out == text
    options, _, examples = text.partition("examples:\n")
    assert f"irc {name}" in examples
    known = set(re.findall(r"--[a-z][\w-]*|(?<=\s)-o\b", options))
    for line in examples.splitlines():
        if line.strip().startswith(f"irc {name} "):
            command = re.split(r"\s\||\s>", line)[0]
            used = set(re.findall(r"(?<=\s)(?:--[a-z][\w-]*|-o)\b", command))
            assert used <= known, line


def test_the_version() -> None:
    assert works("--version").out == f"irc {__version__}\n"
    assert project()["project"]["version"] == __version__


def test_a_repeated_option_adds_to_the_first(
    module: Path, checkpoint: Path, tmp_path: Path
) -> None:
    text = works("opt", module, "--passes", "cse", "--passes", "dce").out
    assert text == works("opt", module, "--passes", "cse, dce").out
    limits = ("--limit", "cse=0", "--limit", "dce=0")
    assert "%again" in works("opt", module, "--passes", "cse, dce", *limits).out
    ranges = ("--dims", "B=3:3:4", "--dims", "C=64")
    meshes = ("--mesh", "tp=2", "--mesh", "dp=1")
    works("compile", checkpoint, *ranges, *meshes, "-o", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "config.json").read_text())
    assert manifest["dims"] | {"B": [3, 3, 4], "C": [64, 64, 64]} == manifest["dims"]
    assert manifest["mesh"] == "dp=1, tp=2"


def failing(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    """Let `irc show` fail."""

    def read(place: str) -> None:
        raise failure

    monkeypatch.setattr("irc.cli.show.read_module", read)


def test_an_internal_failure_is_reported(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, KeyError("surprise"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = irc("show", module, "--locs")
    (line,) = answer.err.splitlines()
    assert line.startswith("error: irc failed because of a defect in irc (KeyError: 'surprise')")
    assert answer.status == 70 and "please report it" in line
    report = Path(line.rpartition(" ")[2]).read_text()
    assert f"command: irc show {module} --locs" in report
    assert f"irc {__version__}" in report and "raise failure" in report
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    answer = irc("show", module)
    assert answer.status == 70
    assert "no report could be written" in answer.err and "--traceback" in answer.err


MESH = "--mesh is an option of irc compile, irc build, irc forecast\n"
NO_ONNX = ModuleNotFoundError("No module named 'onnx'", name="onnx.helper")


@pytest.mark.parametrize(
    ("failure", "status", "says"),
    [
        (NO_ONNX, 1, "error: the package onnx is not installed: pip install onnx\n"),
        (PermissionError(13, "Denied", "secret.irc"), 1, "error: secret.irc: Denied\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (Error("give --mesh tp=4"), 1, f"error: give --mesh tp=4\n{MESH}"),
        (Error("give --mesh to irc forecast"), 1, "error: give --mesh to irc forecast\n"),
        (Error("give --locs, or pip --upgrade"), 1, "error: give --locs, or pip --upgrade\n"),
    ],
)
def test_other_failures(
    failure: BaseException, status: int, says: str, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that an Error advises and that the command lacks are named with their commands."""
    failing(monkeypatch, failure)
    answer = irc("show", module)
    assert (answer.status, answer.out, answer.err) == (status, "", says)


@pytest.mark.parametrize("missing", ["package", "library"])
def test_mpi_that_cannot_be_loaded(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py itself raises a RuntimeError where it finds no library of MPI."""

    def load(name: str) -> None:
        raise RuntimeError(f"cannot load {name}\nlibmpi.so: cannot open shared object file")

    package = ModuleType("mpi4py")
    vars(package).update(rc=SimpleNamespace(), __getattr__=load)
    monkeypatch.setitem(sys.modules, "mpi4py", package if missing == "library" else None)
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ofi")  # which the start sets
    says = (
        r"^MPI is not available \(.+\); use mpich: pip install '\.\[mpi\]' in the checkout of irc$"
    )
    with pytest.raises(Error, match=says), Process(["run"]).communicator():
        pytest.fail("there is no communicator")


@pytest.mark.parametrize("failure", ["Error('a sentence')", "KeyError('surprise')"])
def test_the_traceback_is_shown_on_request(module: Path, failure: str) -> None:
    code = (
        "import sys, irc.cli.show as show\nfrom irc.cli.main import main\n"
        f"from irc.errors import Error\ndef broken(place): raise {failure}\n"
        f"show.read_module = broken\nsys.exit(main(['show', {str(module)!r}, *sys.argv[1:]]))"
    )
    environment = os.environ | {"TMPDIR": str(module.parent)}
    for words in ([], ["--traceback"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert (b"Traceback" in done.stderr) == bool(words)
        assert failure.partition("'")[2][:8].encode() in done.stderr


@pytest.mark.parametrize(
    "outcome", [Error("install it again"), OSError("no"), KeyError("lost"), BrokenPipeError(), None]
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_decides_the_status_whatever_follows(
    module: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Exception | None,
    number: signal.Signals,
    status: int,
) -> None:
    """The import of an extension module may raise another error after a signal, or none."""

    def started(place: str) -> Module:
        with suppress(BaseException):
            os.kill(os.getpid(), number)
        if outcome is not None:
            raise outcome
        return parse_module(MODULE)

    monkeypatch.setattr("irc.cli.show.read_module", started)
    answer = irc("show", module)
    assert answer.status == status
    assert answer.err == ("\ninterrupted\n" if number == signal.SIGINT else "")


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
@pytest.mark.parametrize("passes", ["", " | {irc} opt --passes canonicalize"])
def test_a_reader_that_stops_is_no_failure(module: Path, reader: str, passes: str) -> None:
    """`irc show m.irc | irc opt --passes ... | head -n 1`, every status checked."""
    lines = "".join(f"    %y{i} = add %x, %x : f32[B, 4]\n" for i in range(10_000))
    module.write_text(MODULE.replace("    %y = ", lines + "    %y = "))
    program = f"{sys.executable} -m irc"
    chain = f"{program} show {module}{passes.format(irc=program)} | {reader}"
    done = subprocess.run(
        ["bash", "-c", f"{chain} >/dev/null; echo ${{PIPESTATUS[@]}}"],
        cwd=ROOT,
        env=BUFFERED,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == {"0"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_standard_output_is_an_error(module: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, "show", str(module)],
            cwd=ROOT,
            env=BUFFERED,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.parametrize(
    ("heavy", "calls"),
    [
        ("'numpy', 'onnx', 'onnxruntime', 'tokenizers'", "main(['--help'])"),
        ("'onnx', 'onnxruntime', 'tokenizers'", "[main([name, '--help']) for name in COMMANDS]"),
    ],
)
def test_the_help_loads_nothing_heavy(heavy: str, calls: str) -> None:
    code = (
        f"import sys; from irc.cli.main import main, COMMANDS; {calls}; "
        f"print(*(m for m in ({heavy}) if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""
