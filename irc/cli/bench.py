"""`irc bench`: times an artifact, or collectives or kernels on this machine."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..analysis.units import amount
from ..errors import Error, did_you_mean
from ..report import Columns, Report, Table, table
from .arguments import (
    Usage,
    add_dims,
    add_json,
    add_runtime,
    load_settings,
    runtime_options,
    whole_number,
    word_of,
)
from .arrays import add_inputs, given_inputs
from .console import Progress, answer, warn
from .ranks import Process, add_launcher, of_rank, over_ranks, shared
from .sources import read_module

if TYPE_CHECKING:
    from ..analysis.topology import Measured, Topology
    from ..analysis.topology_fit import Measurement
    from ..backends.commands import Commands
    from ..backends.ranks.communicator import Communicator
    from ..generation.model import Model
    from .arrays import Arrays

EXAMPLES = """
  irc bench build/llama                            (prefill and decode of random tokens)
  irc bench build/scorer --inputs in.npz --runs 100 --json
  irc bench collectives
  irc bench collectives --ranks 4 -o topology.json
  irc bench collectives --on cpu --sizes 4096,1048576 --kinds all_reduce,all_to_all
  mpiexec -n 4 irc bench collectives -o hosts.json              (a rank per process)
  irc bench kernels build/llama --dims B=16,S=1                 (irc uses the fastest from then on)
"""

SIZES = tuple(4096 * 4**i for i in range(8))  # 4 kB to 67 MB
CPU_RANKS = 2
ARTIFACT, COLLECTIVES = "an artifact", "collectives"
_WORD = ("dims", "output")  # the options of what a backend measures
# what is timed -> the options that are for it
_OPTIONS = {
    ARTIFACT: (
        *("runs", "inputs", "random", "backend", "threads", "low_memory", "self_test"),
        *("plugins", "launcher", "hosts", "ranks"),
    ),
    COLLECTIVES: ("on", "kinds", "sizes", "output", "topology", "link", "ranks"),
}


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc bench`."""
    from ..backends import command_parts
    from ..ops.collective_names import OPERATIONS

    add = parser.add_argument
    kinds, sizes = listed(word_of(*OPERATIONS)), listed(whole_number(1024))
    what = "an artifact folder, or what to measure"
    parts = {word: part for part in command_parts() for word in part.benches}
    add("source", metavar="|".join(["DIR", COLLECTIVES, *parts]), help=what)
    what = "; ".join(f"{word}: {part.benches[word]}" for word, part in parts.items())
    add("folders", metavar="DIR", nargs="*", help=what)
    parser.set_defaults(parts=parts)
    add_dims(parser, "sizes at which kernels are timed (default: typical and least ones)")
    what = "times each is measured, after two others (default: 20)"
    add("--runs", metavar="N", type=whole_number(1), help=what)
    add_inputs(parser, required=False)
    add("--on", type=word_of("gpu", "cpu"), help="GPUs through NCCL, or CPU (default: GPUs if any)")
    what = f"of {', '.join(OPERATIONS)} (default: all)"
    add("--kinds", metavar="NAME,...", type=kinds, join=both, default=OPERATIONS, help=what)
    what = "of the whole tensor (default: 4096 to 67108864)"
    add("--sizes", metavar="BYTES,...", type=sizes, join=both, default=SIZES, help=what)
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="write a topology with the fitted constants, or the choices of kernels",
    )
    add("--topology", metavar="FILE", help="the topology they go into (the one for 8 H200)")
    add("--link", metavar="NAME", help="the link that was measured")
    add_runtime(parser)
    add_launcher(parser, "groups of 2 to N (default: all GPUs); of an artifact, start N processes")
    add_json(parser)


def listed(one: Callable[[str], str] | Callable[[str], int]) -> Callable[[str], tuple[object, ...]]:
    """A converter of comma-separated values, without repetitions."""

    def convert(text: str) -> tuple[object, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return convert


def both(first: tuple[object, ...], second: tuple[object, ...]) -> tuple[object, ...]:
    """The values of two lists, without repetitions."""
    return tuple(dict.fromkeys(first + second))


def run(args: Namespace) -> int:
    """Time the artifact, or measure collectives, with the options that are for it."""
    hint = "irc bench --help lists the options"
    what = args.source if args.source in (COLLECTIVES, *args.parts) else ARTIFACT
    allowed = _OPTIONS.get(what, _WORD)
    for name in dict.fromkeys(name for names in (*_OPTIONS.values(), _WORD) for name in names):
        value = getattr(args, name)
        if name not in allowed and (name in args.given or value in (True, False)):
            flag = load_settings()[name][0].flag if name in load_settings() else f"--{name}"
            raise Usage(f"{flag} is not for {what}", hint)
    if args.folders and what not in args.parts:
        raise Usage(f"{args.folders[0]!r} behind {args.source!r} is too much", hint)
    if what == ARTIFACT and not Path(args.source).exists():
        near = did_you_mean(args.source, [COLLECTIVES, *args.parts])
        raise Usage(f"there is no artifact {args.source!r}{near}", hint)
    if what == ARTIFACT:
        return over_ranks(args, time_artifact)
    if what in args.parts:
        if not args.folders:
            raise Usage("expected the folders of artifacts", f"irc bench {what} build/llama")
        with Progress() as progress:
            modules = [read_module(folder) for folder in args.folders]
            part: Commands = args.parts[what]
            report = part.bench(what, modules, args.dims, args.output or "", progress)
        return answer(args, report)
    if args.ranks == 1:
        raise Usage("--ranks is 1; expected 2 or more", hint)
    return _measure(args)


def _measure(args: Namespace) -> int:
    """Measure and fit; print and write, on rank 0 of several processes."""
    from ..analysis.topology_file import default_topology, read_topology

    topology = read_topology(args.topology) if args.topology else default_topology()
    if args.link:
        topology.link(args.link)
    process: Process = args.process
    rank = process.rank
    if rank is None or rank.ranks == 1:
        if gpus := _gpus(args):
            from ..backends.ranks.launch import launch

            return launch(process.argv, gpus)
        from ..backends.measure import SINGLE, Plan, measure_threads

        plan = Plan(args.kinds, args.sizes, args.ranks or CPU_RANKS, SINGLE)
        with Progress() as progress:
            measurements = measure_threads(plan, progress)
        _report(args, topology, *measurements)
        return 0
    if rank.refusal:
        raise Error(rank.refusal)
    process.silence()
    with process.communicator() as own, Progress() as progress:
        measurements = _measure_processes(args, own, process.launched, progress)
    if rank.rank == 0:
        _report(args, topology, *measurements)
    return 0


def _report(
    args: Namespace, topology: Topology, measurements: list[Measurement], about: str
) -> None:
    """Fit the constants; write and print."""
    from ..analysis.topology_file import write_topology
    from ..analysis.topology_fit import fit
    from ..backends.measure import PROCESSES, THREADS

    fitted = fit(measurements)
    if args.output:
        own = next((word for word in (THREADS, PROCESSES) if about.startswith(word)), None)
        link: str = args.link or own or topology.within
        source = f"irc bench collectives on {about}"
        renewed = topology.with_measured(link, fitted, source)
        write_topology(renewed.using(link) if own else renewed, args.output)
    lines = {
        kind: {size: [asdict(line) for line in lines] for size, lines in by_size.items()}
        for kind, by_size in fitted.items()
    }
    measured = [asdict(measurement) for measurement in measurements]
    header = ["ranks", "collective", *map(amount, args.sizes), "fit"]
    text = [f"{about}: microseconds, by bytes of the whole tensor"]
    text += [
        table(_rows(measurements, fitted), header),
        f"wrote {args.output}" if args.output else "",
    ]
    answer(args, Report({"about": about, "measurements": measured, "fitted": lines}, text))


def _rows(measurements: list[Measurement], fitted: Measured) -> list[list[str]]:
    """A row per group size and kind: the times, and the largest relative error of the fit."""
    from ..analysis.topology_fit import worst_error

    groups: dict[tuple[int, str], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.group_size, measurement.kind), []).append(measurement)
    rows: list[list[str]] = []
    for (size, kind), measured in groups.items():
        off = worst_error(measured, fitted[kind][size])
        rows.append([str(size), kind, *(f"{m.us:.1f}" for m in measured), f"within {off:.0%}"])
    return rows


def _gpus(args: Namespace) -> int:
    """The number of GPUs to measure, one process each; 0 to measure threads of the CPU."""
    gpus = 0 if args.on == "cpu" else _with_gpus().device_count()
    if args.on == "gpu" or gpus >= 2:
        ranks: int = args.ranks or gpus
        if not 2 <= ranks <= gpus:
            most = max(ranks, 2)
            gpus_here = f"found {gpus}; --on cpu measures threads"
            raise Error(f"expected at least {most} GPUs for groups of 2 to {most}, {gpus_here}")
        return ranks
    if args.on is None:
        reason = "there is no GPU here" if not gpus else "there is one GPU here only"
        warn(f"irc: {reason}, so threads of the CPU are measured")
    return 0


def _with_gpus() -> Commands:
    """The part of the backend that sees the most GPUs here."""
    from ..backends import command_parts

    return max(command_parts(), key=lambda part: part.device_count())


def _measure_processes(
    args: Namespace, own: Communicator, launched: bool, progress: Progress
) -> tuple[list[Measurement], str]:
    """GPUs, where irc started these processes for them or --on says so; else CPUs."""
    from ..backends.measure import SINGLE, Plan, measure_processes

    ranks: int = args.ranks or own.ranks
    if not 2 <= ranks <= own.ranks:
        raise Error(f"expected {max(ranks, 2)} processes at least, found {own.ranks}")
    if launched or args.on == "gpu":
        return _with_gpus().measure(Plan(args.kinds, args.sizes, ranks), own, progress)
    return measure_processes(Plan(args.kinds, args.sizes, ranks, SINGLE), own, progress)


RUNS, FIRST = 20, 2  # runs by default; those before, which are not counted
_PERCENTILES = (50, 90, 99)


def time_artifact(args: Namespace, communicator: Communicator | None) -> int:
    """Load, run, and print latencies and throughput per phase; all ranks run, rank 0 prints."""
    from ..driver import open_model

    inputs = shared(communicator, lambda: given_inputs(args))
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        progress(f"timing {args.source}")
        phases = _phases(model, inputs, args.runs or RUNS, args.inputs is not None)
    phase_facts = [_facts(phase) for phase in phases]
    return answer(
        args, Report({"artifact": args.source, "phases": phase_facts}, [Table(phase_facts, _TIMES)])
    )


def _phase_of(row: Mapping[str, Any]) -> str:
    count, unit = row["per_run"], row["unit"]
    return f"{row['phase']} of {count} {unit.removesuffix('s') if count == 1 else unit}"


_TIMES: Columns = {
    "milliseconds": _phase_of,
    "runs": "{runs}",
    **{f"p{percent}": f"{{p{percent}_ms:.2f}}" for percent in _PERCENTILES},
    "mean": "{mean_ms:.2f}",
    "throughput": "{per_second:,.1f} {unit}/s",
}


class _Phase(NamedTuple):
    """The seconds of each run, and what a run computes."""

    name: str
    seconds: list[float]
    work: int
    unit: str


def _phases(model: Model, inputs: Arrays, runs: int, given: bool) -> list[_Phase]:
    """A language model has two phases, unless its inputs are given; others have one."""
    if not given and "input_ids" in inputs and model.program.ports.states:
        return _generation(model, inputs["input_ids"][0].tolist(), runs)
    lengths = {len(array) if array.ndim else 1 for array in inputs.values()}
    rows, unit = (lengths.pop(), "rows") if len(lengths) == 1 else (1, "calls")
    return [_Phase("run", _seconds(runs, lambda: model.run(inputs)), rows, unit)]


def _generation(model: Model, prompt: list[int], runs: int) -> list[_Phase]:
    """Prefill of one row of tokens, and decode of one token after them, as irc generate does."""
    from ..generation.greedy import greedy
    from ..generation.inputs import cache_range

    program, dims, steps = model.program, model.dims, FIRST + runs
    prefills = [greedy(program, prompt, 1, dims=dims).prefill_seconds for _ in range(steps)]
    at: list[float] = []  # when each token was there
    capacity = cache_range(program.ports.states, dims)[1] or len(prompt) + steps
    before = prompt[: max(capacity - steps, 1)]
    greedy(program, before, steps + 1, dims=dims, emit=lambda _: at.append(time.perf_counter()))
    phases = [_Phase("prefill", prefills[FIRST:], len(prompt), "tokens")]
    decodes: list[float] = np.diff(at)[FIRST:].tolist()  # none where the cache is that small
    return [*phases, _Phase("decode", decodes, 1, "tokens")] if decodes else phases


def _seconds(runs: int, work: Callable[[], object]) -> list[float]:
    """The seconds of each run, after the first ones."""
    seconds: list[float] = []
    for _ in range(FIRST + runs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds[FIRST:]


def _facts(phase: _Phase) -> dict[str, Any]:
    mean = float(np.mean(phase.seconds))
    return {
        "phase": phase.name,
        "runs": len(phase.seconds),
        **{f"p{p}_ms": float(np.percentile(phase.seconds, p)) * 1e3 for p in _PERCENTILES},
        "mean_ms": mean * 1e3,
        "per_run": phase.work,
        "unit": phase.unit,
        "per_second": phase.work / mean,
    }
