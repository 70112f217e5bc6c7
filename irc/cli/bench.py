"""`irc bench`: times an artifact, or collectives or kernels on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.units import amount
from ..errors import Error, did_you_mean
from ..report import table
from .arguments import Usage, add_dims, add_json, add_runtime, load_settings, whole_number, word_of
from .arrays import add_inputs
from .bench_artifact import time_artifact
from .console import Progress, answer, print_json, warn
from .ranks import Process, add_launcher, over_ranks
from .sources import read_module

if TYPE_CHECKING:
    from ..analysis.topology import Measured, Topology
    from ..analysis.topology_fit import Measurement
    from ..backends.commands import Commands
    from ..backends.ranks.communicator import Communicator

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
            found = measure_threads(plan, progress)
        _report(args, topology, *found)
        return 0
    if rank.refusal:
        raise Error(rank.refusal)
    process.silence()
    with process.communicator() as own, Progress() as progress:
        found = _measure_processes(args, own, process.launched, progress)
    if rank.rank == 0:
        _report(args, topology, *found)
    return 0


def _report(args: Namespace, topology: Topology, found: list[Measurement], about: str) -> None:
    """Fit the constants; write and print."""
    from ..analysis.topology_file import write_topology
    from ..analysis.topology_fit import fit
    from ..backends.measure import PROCESSES, THREADS

    fitted = fit(found)
    if args.output:
        own = next((word for word in (THREADS, PROCESSES) if about.startswith(word)), None)
        link: str = args.link or own or topology.within
        source = f"irc bench collectives on {about}"
        renewed = topology.with_measured(link, fitted, source)
        write_topology(renewed.using(link) if own else renewed, args.output)
    if args.json:
        lines = {
            kind: {size: [asdict(line) for line in lines] for size, lines in by_size.items()}
            for kind, by_size in fitted.items()
        }
        measured = [asdict(each) for each in found]
        print_json({"about": about, "measurements": measured, "fitted": lines})
        return
    print(f"{about}: microseconds, by bytes of the whole tensor")
    print(table(_rows(found, fitted), ["ranks", "collective", *map(amount, args.sizes), "fit"]))
    if args.output:
        print(f"wrote {args.output}")


def _rows(found: list[Measurement], fitted: Measured) -> list[list[str]]:
    """A row per group size and kind: the times, and the largest relative error of the fit."""
    from ..analysis.topology_fit import worst_error

    groups: dict[tuple[int, str], list[Measurement]] = {}
    for each in found:
        groups.setdefault((each.group_size, each.kind), []).append(each)
    rows: list[list[str]] = []
    for (size, kind), measured in groups.items():
        off = worst_error(measured, fitted[kind][size])
        rows.append([str(size), kind, *(f"{m.us:.1f}" for m in measured), f"within {off:.0%}"])
    return rows


def _gpus(args: Namespace) -> int:
    """The number of GPUs to measure, one process each; 0 to measure threads of the CPU."""
    from ..backends.cuda.runtime import device_count

    gpus = 0 if args.on == "cpu" else device_count()
    if args.on == "gpu" or gpus >= 2:
        ranks: int = args.ranks or gpus
        if not 2 <= ranks <= gpus:
            most = max(ranks, 2)
            found = f"found {gpus}; --on cpu measures threads"
            raise Error(f"expected at least {most} GPUs for groups of 2 to {most}, {found}")
        return ranks
    if args.on is None:
        reason = "there is no GPU here" if not gpus else "there is one GPU here only"
        warn(f"irc: {reason}, so threads of the CPU are measured")
    return 0


def _measure_processes(
    args: Namespace, own: Communicator, launched: bool, progress: Progress
) -> tuple[list[Measurement], str]:
    """GPUs, where irc started these processes for them or --on says so; else CPUs."""
    from ..backends.cuda.measure import measure_gpus
    from ..backends.measure import SINGLE, Plan, measure_processes

    ranks: int = args.ranks or own.ranks
    if not 2 <= ranks <= own.ranks:
        raise Error(f"expected {max(ranks, 2)} processes at least, found {own.ranks}")
    if launched or args.on == "gpu":
        return measure_gpus(Plan(args.kinds, args.sizes, ranks), own, progress)
    return measure_processes(Plan(args.kinds, args.sizes, ranks, SINGLE), own, progress)
