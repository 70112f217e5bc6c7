"""`irc bench`: times an artifact, or collectives or kernels on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analysis.units import amount
from ..driver.timing import PhaseTimes, time_operations
from ..driver.trace import write_trace
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

if TYPE_CHECKING:
    from ..analysis.topology import Measured, Topology
    from ..analysis.topology_fit import Measurement
    from ..backends.commands import Commands
    from ..backends.ranks.communicator import Communicator
    from ..generation.timing import Phase

EXAMPLES = """
  irc bench build/llama                            (prefill and decode of random tokens)
  irc bench build/scorer --inputs in.npz --runs 100 --json
  irc bench build/llama --per-op --dims B=4,S=128      (what takes the most time, and how much)
  irc bench build/llama --trace llama.json             (expected and measured, for Perfetto)
  irc bench collectives
  irc bench collectives --ranks 4 -o topology.json
  irc bench collectives --on cpu --sizes 4096,1048576 --kinds all_reduce,all_to_all
  mpiexec -n 4 irc bench collectives -o hosts.json              (a rank per process)
  irc bench kernels build/llama --dims B=16,S=1                 (the artifact keeps the fastest)
"""

SIZES = tuple(4096 * 4**i for i in range(8))  # 4 kB to 67 MB
CPU_RANKS = 2
ARTIFACT, COLLECTIVES = "an artifact", "collectives"
_WORD = ("dims", "output", "launcher", "hosts", "ranks")  # the options of what a backend measures
# what is timed -> the options that are for it
_OPTIONS = {
    ARTIFACT: (
        *("runs", "inputs", "random", "backend", "threads", "low_memory", "self_test"),
        *("plugins", "locked", "launcher", "hosts", "ranks", "dims", "per_op", "trace"),
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
    add_dims(parser, "sizes of inputs (default: typical ones, one row of tokens), or of kernels")
    what = "time every operation, beside the least time that its bytes and arithmetic allow"
    add("--per-op", action="store_const", const=True, help=what)
    what = "write expected and measured steps, for Perfetto or chrome://tracing"
    add("--trace", metavar="FILE", help=what)
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
        help="write a topology with the fitted constants, or choices as a table of irc",
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
            flag = f"--{name.replace('_', '-')}"
            flag = load_settings()[name][0].flag if name in load_settings() else flag
            raise Usage(f"{flag} is not for {what}", hint)
    if args.folders and what not in args.parts:
        raise Usage(f"{args.folders[0]!r} behind {args.source!r} is too much", hint)
    if what == ARTIFACT and not Path(args.source).exists():
        near = did_you_mean(args.source, [COLLECTIVES, *args.parts])
        raise Usage(f"there is no artifact {args.source!r}{near}", hint)
    if what == ARTIFACT and args.dims and args.inputs is not None:
        raise Usage("--dims has no effect with --inputs; leave one of them out", hint)
    if what == ARTIFACT:
        return over_ranks(args, time_artifact)
    if what in args.parts:
        if len(args.folders) != 1:
            raise Usage("expected the folder of an artifact", f"irc bench {what} build/llama")
        (args.source,) = args.folders
        return over_ranks(args, partial(_choose, what))
    if args.ranks == 1:
        raise Usage("--ranks is 1; expected 2 or more", hint)
    return _measure(args)


def _choose(what: str, args: Namespace, communicator: Communicator | None) -> int:
    """Let a backend choose what is the fastest for an artifact; all ranks run, rank 0 prints."""
    from ..artifact.folder import ArtifactFolder
    from ..backends.commands import Benched
    from ..driver import load
    from ..generation.random_inputs import complete_inputs
    from ..ir.dims import checked_sizes

    part: Commands = args.parts[what]
    with Progress() as progress:
        progress(f"loading {args.source}")
        opened = args.artifact or ArtifactFolder.open(Path(args.source))
        artifact = load(opened, **of_rank(communicator))
        module, program = artifact.module, artifact.program
        sizes = checked_sizes(args.dims, module.dims)
        inputs = partial(complete_inputs, module, 0)
        file: str = args.output or ""
        report = part.bench(what, Benched(opened, module, program, sizes, inputs, file), progress)
    return answer(args, report)


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


_PERCENTILES = (50, 90, 99)


def time_artifact(args: Namespace, communicator: Communicator | None) -> int:
    """Load, run, and print latencies and throughput per phase; all ranks run, rank 0 prints."""
    from ..backends import describe
    from ..driver import open_model
    from ..generation.timing import RUNS, phases

    runs, given = args.runs or RUNS, args.inputs is not None
    inputs = shared(communicator, lambda: given_inputs(args, args.dims))
    sizes = {name: size for name, (_, size, _) in args.dims.items()}
    options = runtime_options(args) | of_rank(communicator)
    place = args.artifact or args.source
    with Progress() as progress:
        if args.per_op or args.trace:
            progress(f"timing the operations of {args.source}")
            arrays = inputs if given else None
            settings = {"dims": sizes, "runs": runs, "seed": args.random or 0}
            times = time_operations(place, arrays, backend=args.backend, **settings, **options)
            return answer(args, _operations(args, times))
        progress(f"loading {args.source}")
        model = open_model(place, args.backend, **options)
        progress(f"timing {args.source}")
        timed = phases(model, inputs, runs, given=given, steps=bool(sizes), sizes=sizes)
    facts = [_facts(phase) for phase in timed]
    about = describe(args.artifact)
    lines = [f"{name}: {text}" for name, text in about.items()]
    facts_of_all = {"artifact": args.source, "phases": facts, **about}
    return answer(args, Report(facts_of_all, [Table(facts, _TIMES), *lines]))


def _operations(args: Namespace, phases: Sequence[PhaseTimes]) -> Report:
    """The report about operations, and the trace if it is asked for."""
    facts = [_facts(times.phase) for times in phases]
    text: list[str | Table] = [Table(facts, _TIMES)]
    for fact, times in zip(facts, phases, strict=True):
        text += _per_operation(times, fact)
    if args.trace:
        write_trace(Path(args.trace), phases)
        text.append(f"wrote {args.trace}; https://ui.perfetto.dev opens it")
    return Report({"artifact": args.source, "phases": facts}, text)


def _per_operation(times: PhaseTimes, fact: dict[str, Any]) -> list[str | Table]:
    """The lines about the operations of a phase, which `fact` gets as well."""
    rows, inside = times.operations, times.us - times.rest_us
    fact |= {"operations": [asdict(row) for row in rows], "floor": times.rates}
    fact |= {"us": times.us, "rest_us": times.rest_us}
    cells = [
        [
            (row.scope or "(top)") + f" × {row.layers}" * (row.layers > 1),
            *(row.operation, f"{row.calls:.0f}", f"{row.us:,.1f}", f"{row.share:.1%}"),
            *(amount(row.nbytes), f"{row.floor_us / row.us:.0%}" if row.floor_us else ""),
        ]
        for row in rows
    ]
    head = f"\n{times.phase.name}: microseconds of a run while every operation is timed"
    sums = (
        f"{inside:,.1f} us in operations, {times.rest_us:,.1f} us outside of them (dispatch, "
        f"inputs and results), {times.us:,.1f} us in all; the floor is that of {times.rates}"
    )
    header = ("scope", "operation", "calls", "us", "share", "bytes", "floor")
    return [head, table(cells, header), sums]


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


def _facts(phase: Phase) -> dict[str, Any]:
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
