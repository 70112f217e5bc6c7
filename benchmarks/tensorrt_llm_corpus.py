"""Runs NVIDIA's example scripts and unit tests of TensorRT-LLM through irc, tensors on the CPU.

`IRC_TENSORRT_LLM_SOURCES` is a folder with a folder per release (`0.7.1/examples`, `0.7.1/tests`,
`0.7.1/tensorrt_llm`, ...). `IRC_TENSORRT_LLM_SITES` may have a folder `tools` of libraries that the
tests import, and folders such as `4.33.1` with that release of transformers, which are searched
first: scripts of old releases expect old releases of transformers.

    python -m benchmarks.tensorrt_llm_corpus test 0.7.1 functional/test_slice.py -k slice_1
    python -m benchmarks.tensorrt_llm_corpus tests 0.7.1 functional --output FOLDER
    python -m benchmarks.tensorrt_llm_corpus scripts 0.7.1 "llama/build.py tp2" --output FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from .tensorrt_llm_examples import PROMPTS, Example, check, examples, make_model
from .tensorrt_llm_simulation import simulate

SOURCES = Path(os.environ.get("IRC_TENSORRT_LLM_SOURCES", ""))
SITES = Path(os.environ.get("IRC_TENSORRT_LLM_SITES", "."))
CASES = 6  # of a parameterized test; --cases 0 runs all
SECONDS = 120  # of one test; an example has 15 times as many, a folder of tests 30 times
# The release of transformers that each release of TensorRT-LLM asks for, or the nearest that runs
# with numpy 2.
TRANSFORMERS = {
    "0.5": "4.33.1", "0.6": "4.33.1", "0.7": "4.33.1", "0.8": "4.36.1", "0.9": "4.38.2",
    "0.10": "4.40.2", "0.11": "4.40.2", "0.12": "4.40.2", "0.13": "4.40.2",
    "0.14": "4.45.1", "0.15": "4.45.1", "0.16": "4.45.1",
}  # fmt: skip
TESTS = ("functional/test_*.py", "attention/test_*.py", "quantization/test_*.py",
         "model/test_*.py", "test_*.py")  # fmt: skip


_MODULE = "benchmarks.tensorrt_llm_corpus"
_ROW = "@row "  # before the rows that a process prints


@dataclass(frozen=True)
class Row:
    """One script or test of a release, and how it ended."""

    release: str
    name: str
    outcome: str  # pass, wrong number, refused, stops, skipped
    obstacle: str = ""  # the begin of the message
    where: str = ""  # file:line in NVIDIA's sources, and in irc

    def __str__(self) -> str:
        return " | ".join((self.release, self.name, self.outcome, self.obstacle, self.where))

    def tell(self) -> None:
        """Print the row for a parent process, at once: a test may end the process."""
        print(f"\n{_ROW}{json.dumps(asdict(self))}", file=sys.__stdout__, flush=True)


def minor(release: str) -> str:
    """`0.7` of `0.7.1`."""
    return ".".join(release.split(".")[:2])


def libraries(release: str) -> list[str]:
    """The folders whose packages a release finds before those that are installed, and behind."""
    return [str(SITES / TRANSFORMERS[minor(release)]), str(SITES / "tools")]


# ---- tests, in a process for each file


@contextmanager
def world(release: str) -> Iterator[None]:
    """tensorrt_llm of a release is irc in the block."""
    import irc
    from irc.frontends.tensorrt_llm.aliases import aliases

    root = Path(irc.__file__).resolve().parent.parent
    hidden = (root, root / "benchmarks")  # their `tests` and `examples` are not NVIDIA's
    others = [entry for entry in sys.path if Path(entry or ".").resolve() not in hidden]
    first, last = libraries(release)
    sys.path[:] = [first, *others, last, str(SOURCES / release)]
    with session(release), aliases():
        yield


def session(release: str, backend: str = "onnx") -> Any:
    """A session of irc in which tests of this release run, with its sources."""
    from irc.frontends.tensorrt_llm.context import new_session

    sources = (SOURCES / release / "tensorrt_llm").resolve()
    return new_session(release, sources=sources, options={"backend": backend})


class Plugin:
    """Pytest's hooks: a session for every test, a sample of the cases, and a row for each."""

    def __init__(self, release: str, cases: int, backend: str) -> None:
        self.release, self.cases, self.backend = release, cases, backend

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Run a test in a session of its own."""
        with session(self.release, self.backend):
            return (yield)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep some cases of every function, evenly spread."""
        groups: dict[Any, list[Any]] = {}
        for item in items:
            groups.setdefault(_function_of(item), []).append(item)
        kept: set[Any] = set()
        for every in groups.values():
            count = min(self.cases or len(every), len(every))
            kept |= {every[i * len(every) // count] for i in range(count)}
        items[:] = [item for item in items if item in kept]

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """A test, or the import of its file, failed."""
        self._add(node.nodeid, *outcome_of(call.excinfo.value))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test passed or was skipped."""
        if report.when == "call" and report.passed:
            self._add(report.nodeid, "pass")
        if report.skipped:
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
            self._add(report.nodeid, "skipped", reason[:200])

    def _add(self, node: str, *outcome: str) -> None:
        Row(self.release, node.replace("::", " ").split("tests/")[-1], *outcome).tell()


def _function_of(item: Any) -> Any:
    """The function that a case of `parameterized` or of pytest calls."""
    function = getattr(item.obj, "__func__", item.obj)
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents):
            return item.parent, cell.cell_contents
    return item.parent, getattr(item, "originalname", item.name)


def outcome_of(error: BaseException) -> tuple[str, str, str]:
    """(outcome, begin of the message, where) of an exception."""
    from irc.errors import Error

    text = error.message if isinstance(error, Error) else str(error)
    if "\nE   " in text:  # pytest's text about a module that cannot be imported
        text = text.rpartition("\nE   ")[2]
    text = " ".join(text.split())[:400]
    is_number = re.search(r"Mismatched elements|not close|Not equal to tol|not equal|arrays", text)
    if isinstance(error, Error):
        return "refused", text, places(error)
    if isinstance(error, AssertionError) and is_number:
        return "wrong number", text, places(error)
    return "stops", f"{type(error).__name__}: {text}", places(error)


def places(error: BaseException) -> str:
    """The innermost lines of NVIDIA's sources and of irc that an exception passed."""
    import irc

    own = Path(irc.__file__).resolve().parent.parent
    inner: dict[str, str] = {}
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()
        for kind, folder in (("", SOURCES.resolve()), ("irc ", own)):
            if path.is_relative_to(folder) and not {"benchmarks", ".venv"} & {*path.parts}:
                inner[kind] = f"{kind}{path.relative_to(folder)}:{frame.lineno}"
    return ", ".join(inner.values())


def run_tests(release: str, files: list[str], cases: int, backend: str, more: list[str]) -> None:
    """Run files of tests of one folder in this process, and print rows."""
    simulate()
    root = SOURCES / release / "tests"
    options = ["-c", os.devnull, "--rootdir", str(root), "-q", "-p", "no:cacheprovider",
               "--noconftest", "-W", "ignore", "--timeout", str(SECONDS),
               "--continue-on-collection-errors"]  # fmt: skip
    with world(release):
        names = [str(root / file) for file in files]
        pytest.main([*names, *options, *more], plugins=[Plugin(release, cases, backend)])


# ---- scripts: the commands that a user would type


_SEEDED = (
    "import sys, torch; from irc.cli.main import main; torch.manual_seed(0); "
    "sys.exit(main(sys.argv[1:]))"
)


def command_of(example: Example, words: list[str], release: str, artifacts: Path) -> list[str]:
    """A command of an example as arguments of Python."""
    options = ["--tensorrt-llm", minor(release)]
    if example.sources:
        options += ["--tensorrt-llm-sources", str(SOURCES / release)]
    if words[0] == "irc":
        return ["-m", "irc", *words[1:], *(options[2:] if words[1] == "build" else options)]
    script = str(SOURCES / release / words[0])
    if script.endswith("/build.py"):
        # the script of BERT makes random weights
        begin = ["-c", _SEEDED] if example.family == "bert" else ["-m", "irc"]
        compiled = [*begin, "compile", script, "-o", str(artifacts)]
        return [*compiled, *options, "--", *words[1:]]
    if script.endswith("/run.py"):
        options += ["--processes", str(example.ranks)]
    return ["-m", "irc.frontends.tensorrt_llm", *options, script, *words[1:]]


def run_example(release: str, example: Example, folder: Path) -> Row:
    """Run the commands of an example one after the other, and compare the results."""
    model = folder / "models" / TRANSFORMERS[minor(release)] / example.family
    own = folder / release / re.sub(r"\W+", "_", example.name)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    paths = {"model": model, "out": own / "engine", "checkpoint": own / "checkpoint",
             "prompts": own / "prompts.csv", "tokens": own / "tokens.npy"}  # fmt: skip
    paths["prompts"].write_text("".join(",".join(map(str, ids)) + "\n" for ids in PROMPTS))
    if not model.is_dir():
        make_model(example.family, model)
    for words in example.commands:
        words = words.format(family=example.family, **paths).split()
        command = [sys.executable, *command_of(example, words, release, own / "artifacts")]
        done = subprocess.run(command, capture_output=True, text=True)
        with (own / "log.txt").open("a") as log:
            print(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}", file=log)
        if done.returncode:
            return Row(release, example.name, *_outcome_of_text(done.stdout + done.stderr))
    difference = check(example, model, paths["out"], paths["tokens"])
    return Row(release, example.name, "wrong number" if difference else "pass", difference)


def _outcome_of_text(printed: str) -> tuple[str, str, str]:
    """(outcome, message, where) of what a command printed when it failed."""
    errors = re.findall(r"^(?:error: |\w*(?:Error|Exception|Exit): ).*(?:\n    .*)?", printed, re.M)
    text = errors[-1] if errors else printed.strip()[-300:]
    text = text.removeprefix("error: ")
    place = re.match(r"(\S+\.py:\d+)(?: in \S+)?: ", text)
    where = place[1].removeprefix(f"{SOURCES}/") if place else ""
    text = " ".join(text[place.end() :].split() if place else text.split())[:400]
    is_sentence = bool(errors) and not re.match(r"\w+(Error|Exception|Interrupt|Exit)\b", text)
    return "refused" if is_sentence else "stops", text, where


# ---- the table


def in_child(release: str, times: int, *arguments: str) -> tuple[list[Row], int, str]:
    """The rows that this program prints with the libraries of a release, its exit status, and all
    that it prints; it has some times SECONDS."""
    first, last = libraries(release)
    path = [first, *filter(None, [os.environ.get("PYTHONPATH")]), last]
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, *arguments],
            env=os.environ | variables, timeout=times * SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        status, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as end:
        status, printed = 124, (end.stdout or b"").decode(errors="replace") + "\nit did not end"
    rows = [line[len(_ROW) :] for line in printed.splitlines() if line.startswith(_ROW)]
    return [Row(**json.loads(row)) for row in rows], status, printed


def rows_of_tests(own: argparse.Namespace) -> Iterator[Row]:
    """A row for every test of the files whose path begins with `name`; a process for a folder."""
    folder = SOURCES / own.release / "tests"
    options = ("--cases", str(own.cases), "--backend", own.backend, "--tb=no")
    for pattern in TESTS:
        files = [str(path.relative_to(folder)) for path in sorted(folder.glob(pattern))]
        files = [file for file in files if file.startswith(own.name)]
        while files:
            names = ",".join(files)
            rows, status, printed = in_child(own.release, 30, "test", own.release, names, *options)
            yield from rows
            if status in (0, 1):
                break
            # a test has ended the process: go on behind its file
            last = rows[-1].name.split(" ")[0] if rows else files[0]
            files = files[files.index(last) + 1 :] if last in files else []
            yield Row(own.release, last, "stops", printed.strip()[-200:])


def rows_of_scripts(own: argparse.Namespace) -> Iterator[Row]:
    """A row for every example whose name begins with `name`; a process for each."""
    for example in examples(own.release):
        if example.name.startswith(own.name):
            words = ("script", own.release, example.name, "--output", str(own.output.resolve()))
            rows, _, printed = in_child(own.release, 15, *words)
            yield from rows or [Row(own.release, example.name, "stops", printed.strip()[-200:])]


def main() -> None:
    """Run what the command line asks for, and print a row for each script or test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("kind", choices=("test", "tests", "script", "scripts"))
    add("release")
    add("name", nargs="?", default="", help="a file of tests, or the begin of names of scripts")
    add("--cases", type=int, default=CASES, help="of a parameterized test (0: all)")
    add("--output", type=Path, default=Path(), help="where tables, models and engines go")
    what = "of the engines of a test (reference rounds every result)"
    add("--backend", default="onnx", help=what)
    own, options = parser.parse_known_args()
    if not (SOURCES / own.release).is_dir():
        parser.error(f"set IRC_TENSORRT_LLM_SOURCES to a folder that has {own.release}")
    if own.kind == "test":
        run_tests(own.release, own.name.split(","), own.cases, own.backend, options)
    elif own.kind == "script":
        (example,) = [example for example in examples(own.release) if example.name == own.name]
        run_example(own.release, example, own.output).tell()
    else:
        write(own, rows_of_tests(own) if own.kind == "tests" else rows_of_scripts(own))


def write(own: argparse.Namespace, rows: Iterator[Row]) -> None:
    """Print rows, and write them to a file of the release."""
    own.output.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with (own.output / f"{own.release}-{own.kind}.txt").open("w") as stream:
        for row in rows:
            counts[row.outcome] += 1
            print(row, file=stream, flush=True)
            print(row, flush=True)
        total = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{own.release} {own.kind}: {total}", file=stream)
    print(f"{own.release} {own.kind}: {total}")


if __name__ == "__main__":
    main()
