"""Runs examples of operations and tiny models as programs of plans on a GPU, and compares the
results with the reference. Prints a line per operation, then what differs.

    python -m tests.cuda.try_on_gpu [--dtypes f32,bf16,i32] [--only REGEX] [--seed N] [--jobs N]

Each example runs at several sizes, three times each: launched, captured, and from its graph.
`--host` tries it without a GPU, by kernels that g++ compiles; `--unfused` without kernels for
several operations; `--plain` without graphs and programmatic launches; `--stepwise` waits after
every launch, so that errors name their kernels. Processes share the examples; after a failure of
the GPU another process continues behind it.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import irc.passes
from irc.backends.cuda.backend import backend
from irc.backends.cuda.execute.load import FAILED, CudaGpu, CudaProgram, open_gpu, program_of
from irc.backends.reference import ReferenceProgram, evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import dtype_of
from irc.pipeline import run_pipeline
from tests.cuda.cases import STEPS, Case, cases, odd_sizes
from tests.ops.compare import CLOSE
from tests.ops.example import inputs_of
from tests.ops.examples import EXAMPLES
from tests.sharded.models import MODELS

assert irc.passes
TIMEOUT = 120.0  # seconds that one example may take, compilation too
MODEL = "model"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Subject:
    """An example of an operation in a dtype, or a tiny model."""

    name: str
    case: Case | None

    def __str__(self) -> str:
        return self.name if self.case is None else f"{self.case.example} in {self.case.dtype}"


def subjects(args: argparse.Namespace) -> list[Subject]:
    """What is run, in the same order in every process."""
    wanted = args.dtypes.split(",")
    found: list[Subject] = []
    for name, examples in EXAMPLES.items():
        own = [e for e in examples if not e.local and not e.mesh and e.op != "call"]
        found += [
            Subject(name, case)
            for case in cases(own, lambda op: ())
            if case.dtype in wanted or args.dtypes == "all"
        ]
    found += [Subject(f"{MODEL} {name}", None) for name in MODELS]
    return [each for each in found if re.search(args.only, str(each))]


class Runner:
    """Runs subjects on one GPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._host, self._gpu = args.host, None if args.host else open_gpu(0, 7.0)
        self._options: dict[str, Any] = {"stepwise": args.stepwise}
        if args.plain:
            self._options |= {"graphs": False, "programmatic": False}
        if args.unfused or args.host:
            self._options["fused"] = False

    def gpu(self, number: int) -> CudaGpu:
        """The GPU of this process; a fake one is new for each program."""
        if self._gpu is not None:
            return self._gpu
        from tests.cuda.fake_cuda import FakeCuda
        from tests.tensorrt.fake_nccl import FakeNccl

        return FakeCuda(FakeNccl(), number)

    def run(self, subject: Subject, rng: np.random.Generator) -> list[float]:
        """The errors at all sizes relative to what is allowed."""
        with tempfile.TemporaryDirectory() as folder:
            if subject.case is None:
                return list(self._model(subject.name.removeprefix(f"{MODEL} "), Path(folder), rng))
            return list(self._example(subject.case, Path(folder), rng))

    def _program(self, module: Module, folder: Path) -> CudaProgram:
        return program_of(module, folder, gpu=self.gpu, **self._options)

    def _example(self, case: Case, folder: Path, rng: np.random.Generator) -> Iterator[float]:
        module = case.module
        program = self._program(module, folder)
        for sizes in odd_sizes(case.example, rng):
            example = type(case.example)(**{**vars(case.example), "sizes": sizes})
            first, second = (inputs_of(example, case.dtype, rng) for _ in range(2))
            for inputs in (first, first, second):
                try:
                    wanted = evaluate(module, inputs, sizes=sizes)
                except Error:  # inputs that the operation refuses
                    continue
                found = program.run(inputs)
                for name, want in wanted.items():
                    what = f"{name} at {sizes}"
                    yield error_of(found[name], want, what, case.example.op == "rope")
        program.close()

    def _model(self, name: str, folder: Path, rng: np.random.Generator) -> Iterator[float]:
        module = MODELS[name]()
        run_pipeline(module, backend.default_pipeline)
        program, right = self._program(module, folder), ReferenceProgram(MODELS[name]())
        for rows in (1, 3):
            streams = [each.open({"B": rows, "C": 32}) for each in (program, right)]
            past = 0
            for tokens in (4, 1, 1, 1, 1):
                step = model_inputs(program, rows, past, tokens, rng)
                found, wanted = (stream.step(step) for stream in streams)
                for key, want in wanted.items():
                    yield error_of(found[key], want, f"{key} of {rows} rows", True)
                past += tokens
        program.close()


def model_inputs(
    program: CudaProgram, rows: int, past: int, tokens: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Random tokens behind `past` ones."""
    positions = np.arange(past, past + tokens, dtype=np.int32)
    every = {
        "input_ids": rng.integers(0, 5, (rows, tokens)).astype(np.int32),
        "positions": np.tile(positions, (rows, 1)),
        "past_lengths": np.full(rows, past, np.int32),
        "logit_positions": np.full((rows, 1), tokens - 1, np.int32),
    }
    return {port.name: every[port.name] for port in program.ports.inputs}


def error_of(got: Any, want: Any, what: str, wide: bool = False) -> float:
    """The largest error relative to what is allowed, `wide`: of angles and sums of f32."""
    kind = dtype_of(want)
    assert (got.shape, dtype_of(got)) == (want.shape, kind), f"{what}: {got.dtype}{got.shape}"
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size = np.abs(a - b)
    if kind in STEPS:
        limit = STEPS[kind] * np.maximum(np.abs(a), np.abs(b)) + np.finfo(np.float32).tiny
    else:
        finite = np.abs(b[np.isfinite(b)])
        limit = np.asarray(CLOSE.get(kind, 0.0) * max(1.0, float(finite.max(initial=1.0))))
        limit = limit * (CLOSE["f32"] / CLOSE["f64"] if wide and kind == "f64" else 1)
        limit = limit * (16 if wide and kind == "f32" else 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(same, 0.0, size / limit)
    worst = float(np.max(np.nan_to_num(ratio, nan=np.inf), initial=0.0))
    if worst > 1:
        at = np.unravel_index(int(np.argmax(np.nan_to_num(ratio, nan=np.inf))), ratio.shape)
        raise AssertionError(f"{what}{list(map(int, at))}: expected {want[at]}, found {got[at]}")
    return worst


def work(args: argparse.Namespace) -> None:
    """Run every `--jobs`-th subject from the number `--worker` on; a line of JSON per subject."""
    runner = Runner(args)
    for number, subject in list(enumerate(subjects(args)))[args.worker :: args.jobs]:
        say(number=number)
        try:
            found = runner.run(subject, np.random.default_rng([args.seed, number]))
            say(number=number, runs=len(found), worst=max(found, default=0.0))
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            say(number=number, error=f"{text} [{where}]"[:600])
            if FAILED in text or "cuLaunchKernelEx failed" in text:
                sys.exit(1)  # nothing runs on this GPU any more


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def supervise(
    args: argparse.Namespace, job: int, every: Sequence[Subject], results: list[dict[str, Any]]
) -> None:
    """Fill in the results of a job, by processes that each continue behind the last."""
    numbers = range(job, len(every), args.jobs)
    done = 0
    while done < len(numbers):
        line = [sys.executable, "-m", "tests.cuda.try_on_gpu", *sys.argv[1:]]
        line += ["--worker", str(numbers[done]), "--seed", str(args.seed)]
        before = done
        with subprocess.Popen(line, stdout=subprocess.PIPE, bufsize=0, cwd=ROOT) as process:
            why = ""
            for facts in _lines(process):
                if "lost" in facts:
                    why = str(facts["lost"])
                elif len(facts) > 1:
                    results[facts["number"]] = facts
                    done += 1
            process.kill()
        if done < len(numbers) and not why and done == before:  # it could not start
            for number in numbers[done:]:
                results[number] = {"error": "no process could run it; see above"}
            return
        if done < len(numbers) and why:
            results[numbers[done]] = {"error": why}
            done += 1


def _lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What a process reports; at last why a subject has no result, if one has none."""
    assert process.stdout is not None
    is_open = False
    while select.select([process.stdout], [], [], TIMEOUT)[0]:
        line = process.stdout.readline()
        if not line:
            if is_open:
                yield {"lost": "the process crashed"}
            return
        facts = json.loads(line)
        is_open = len(facts) == 1
        yield facts
    yield {"lost": f"no result within {TIMEOUT:.0f} seconds"}


def report(every: Sequence[Subject], results: Sequence[dict[str, Any]], seconds: float) -> int:
    """Print the table and the errors; the exit status."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for subject, result in zip(every, results, strict=True):
        groups.setdefault(subject.name, []).append(result)
    print(f"{'operation':28} {'examples':>8} {'runs':>6} {'failed':>6}  error / allowed")
    for name, found in groups.items():
        failed = sum("error" in each for each in found)
        runs = sum(each.get("runs", 0) for each in found)
        worst = max((each.get("worst", 0.0) for each in found), default=0.0)
        print(f"{name:28} {len(found):8} {runs:6} {failed or '':>6}  {worst:.3f}")
    broken = [(s, r["error"]) for s, r in zip(every, results, strict=True) if "error" in r]
    for subject, error in broken:
        print(f"FAILED {subject}: {error}")
    print(f"{len(every)} examples, {len(broken)} failed, {seconds:.0f} s")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="f32,bf16,i32", help="or all")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=8, help="processes (8)")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--unfused", action="store_true")
    parser.add_argument("--stepwise", action="store_true")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return 0
    every, began = subjects(args), time.perf_counter()
    print(f"seed {args.seed}, {len(every)} examples", flush=True)
    results = [dict[str, Any]() for _ in every]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: supervise(args, job, every, results), range(args.jobs)))
    return report(every, results, time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
