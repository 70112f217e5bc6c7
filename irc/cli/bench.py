"""`irc bench`: measures this machine. `irc bench collectives` times what ranks send each other."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import Error
from ..units import amount
from .arguments import add_json, whole_number, word_of
from .console import Progress, print_json, table, warn

if TYPE_CHECKING:
    from ..analysis.topology import Measured, Topology
    from ..analysis.topology_fit import Measurement
    from .place import Place

EXAMPLES = """
  irc bench collectives
  irc bench collectives --ranks 4 -o topology.json
  irc bench collectives --on cpu --sizes 4096,1048576 --kinds all_reduce,all_to_all
  mpiexec -n 4 irc bench collectives -o hosts.json              (a rank per process)
"""

SIZES = tuple(4096 * 4**i for i in range(8))  # 4 kB to 67 MB
CPU_RANKS = 2


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc bench`."""
    from ..collectives import OPERATIONS

    add = parser.add_argument
    add("benchmark", metavar="collectives", type=word_of("collectives"), help="what to measure")
    add("--on", type=word_of("gpu", "cpu"), help="GPUs through NCCL, or CPU (GPUs if there)")
    add("--ranks", metavar="N", type=whole_number(2), help="groups of 2 to N (all GPUs)")
    add(
        "--kinds",
        metavar="NAME,...",
        type=listed(word_of(*OPERATIONS)),
        default=OPERATIONS,
        help=f"of {', '.join(OPERATIONS)} (all)",
    )
    add(
        "--sizes",
        metavar="BYTES,...",
        type=listed(whole_number(1024)),
        default=SIZES,
        help="of the whole tensor (4096 to 67108864)",
    )
    add("-o", "--output", metavar="FILE", help="write a topology with the fitted constants")
    add("--topology", metavar="FILE", help="the topology they go into (the one for 8 H200)")
    add("--link", metavar="NAME", help="the link that was measured")
    add_json(parser)


def listed(one: Callable[[str], str] | Callable[[str], int]) -> Callable[[str], tuple[object, ...]]:
    """An option's value that lists values of one kind, each once."""

    def convert(text: str) -> tuple[object, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return convert


@dataclass(frozen=True)
class Outcome:
    """What was measured, on what, and the constants that come nearest."""

    about: str
    measurements: list[Measurement]
    fitted: Measured


def run(args: Namespace) -> int:
    """Measure, fit, print, write; of several processes, the first one does the latter."""
    from ..analysis.topology_file import default_topology, read_topology

    topology = read_topology(args.topology) if args.topology else default_topology()
    if args.link:
        topology.link(args.link)
    place: Place | None = args.process.place
    if place is None or place.ranks == 1 or args.on == "gpu":
        with Progress() as progress:
            found = _measure(args, progress)
        _report(args, topology, *found)
        return 0
    with Progress(quiet=place.rank > 0) as progress:
        found = _measure_processes(args, progress)
    if place.rank == 0:
        _report(args, topology, *found)
    return 0


def _report(
    args: Namespace, topology: Topology, measurements: list[Measurement], about: str
) -> None:
    from ..analysis.topology_file import write_topology
    from ..analysis.topology_fit import fit
    from ..backends.measure import PROCESSES, THREADS

    outcome = Outcome(about, measurements, fit(measurements))
    if args.output:
        own = next((word for word in (THREADS, PROCESSES) if about.startswith(word)), None)
        link: str = args.link or own or topology.within
        source = f"irc bench collectives on {about}"
        renewed = topology.with_measured(link, outcome.fitted, source)
        write_topology(renewed.using(link) if own else renewed, args.output)
    if args.json:
        print_json(_facts(outcome))
    else:
        _say(outcome, args.sizes, args.output)


def _measure(args: Namespace, progress: Progress) -> tuple[list[Measurement], str]:
    """GPUs, or threads where there are none."""
    from ..backends.cuda.runtime import device_count
    from ..backends.measure import SINGLE, Plan, measure_threads

    gpus = 0 if args.on == "cpu" else device_count()
    if args.on == "gpu" or gpus >= 2:
        ranks: int = args.ranks or gpus
        if not 2 <= ranks <= gpus:
            raise Error(
                f"there are {gpus} GPUs here, and groups of 2 to {max(ranks, 2)} were asked for; "
                "give --on cpu to measure threads"
            )
        from ..backends.cuda.measure import measure_gpus

        return measure_gpus(Plan(args.kinds, args.sizes, ranks), progress)
    if args.on is None:
        reason = "there is no GPU here" if not gpus else "there is one GPU here only"
        warn(f"irc: {reason}, so threads of the CPU are measured")
    ranks = args.ranks or CPU_RANKS
    return measure_threads(Plan(args.kinds, args.sizes, ranks, SINGLE), progress)


def _measure_processes(args: Namespace, progress: Progress) -> tuple[list[Measurement], str]:
    """The processes that mpiexec started, of which this is one."""
    from ..backends.measure import SINGLE, Plan, measure_processes
    from ..backends.mpi.communicator import MpiCommunicator

    own = MpiCommunicator()
    ranks: int = args.ranks or own.ranks
    if not 2 <= ranks <= own.ranks:
        raise Error(
            f"there are {own.ranks} processes, and groups of 2 to {max(ranks, 2)} were asked for"
        )
    found = measure_processes(Plan(args.kinds, args.sizes, ranks, SINGLE), own, progress)
    own.close()
    return found


def _facts(outcome: Outcome) -> dict[str, object]:
    return {
        "about": outcome.about,
        "measurements": [asdict(each) for each in outcome.measurements],
        "fitted": {
            kind: {ways: [asdict(line) for line in lines] for ways, lines in by_ways.items()}
            for kind, by_ways in outcome.fitted.items()
        },
    }


def _say(outcome: Outcome, sizes: Sequence[int], output: str | None) -> None:
    from ..analysis.topology_fit import worst_error

    print(f"{outcome.about}: microseconds, by bytes of the whole tensor")
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for each in outcome.measurements:
        groups.setdefault((each.ways, each.kind), []).append(each)
    rows: list[list[str]] = []
    for (ways, kind), measured in groups.items():
        off = worst_error(measured, outcome.fitted[kind][ways])
        rows.append([str(ways), kind, *(f"{m.us:.1f}" for m in measured), f"within {off:.0%}"])
    print(table(rows, ["ranks", "collective", *map(amount, sizes), "fit"]))
    if output:
        print(f"wrote {output}")
