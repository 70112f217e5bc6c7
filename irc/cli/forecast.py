"""`irc forecast`: memory, bytes on the wire and times per rank, before anything is built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..units import amount
from .arguments import (
    add_json,
    add_parallel,
    add_setting,
    parallel_options,
    whole_number,
    word_of,
)
from .compile import ranges
from .console import Progress, paint, print_json, table

if TYPE_CHECKING:
    from ..analysis.forecast import Phase
    from ..analysis.memory import Memory
    from ..driver.forecast import Forecast

RUN = "run"  # the phase of a module that is no language model

EXAMPLES = """
  irc forecast Meta-Llama-3-70B --mesh tp=8
  irc forecast Meta-Llama-3-70B --mesh pp=2,tp=4 --tokens 4096 --dims B=16,C=8192
  irc forecast examples/two_tower.py --link pcie --json

A checkpoint folder needs no more than its config.json.
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc forecast`."""
    add = parser.add_argument
    add("source", metavar="SRC", help="script.py[:factory], config.json's folder, module.irc")
    add_parallel(parser)
    add("--tokens", metavar="N", type=whole_number(1), help="tokens of the prompt (S typical)")
    add(
        "--dims",
        metavar="B=1:4:16,...",
        type=ranges,
        default={},
        help="sizes of symbolic dimensions, or their ranges, of which the middle one counts",
    )
    add("--topology", metavar="FILE", help="what the machine costs (that of 8 H200)")
    add("--link", metavar="NAME", help="the link within a host: nvlink, pcie or ethernet")
    add("--checkpoint", metavar="DIR", help="the folder that a script reads its sizes from")
    add("--backend", metavar="NAME", default="onnx", help="whose passes run: onnx, reference")
    add("--pipeline", metavar="TEXT", help="the passes, in place of the backend's own")
    add("--dtype", type=word_of("f32", "f16", "bf16"), help="compute in f32, f16 or bf16")
    add_setting(add)
    add_json(parser)


def run(args: Namespace) -> int:
    """Forecast and print."""
    from ..analysis.topology_file import default_topology, read_topology
    from ..driver.forecast import forecast
    from ..driver.pipelines import Parallel

    topology = read_topology(args.topology) if args.topology else default_topology()
    if args.link:
        topology = topology.using(args.link)
    with Progress() as progress:
        progress(f"forecasting {args.source}")
        found = forecast(
            args.source,
            topology,
            parallel=Parallel(**parallel_options(args)),
            backend=args.backend,
            pipeline=args.pipeline,
            checkpoint=args.checkpoint,
            dtype=args.dtype,
            settings=dict(args.settings),
            dims=args.dims,
            tokens=args.tokens,
        )
    if args.json:
        print_json(_facts(found))
    else:
        _say(found)
    return 0


def _facts(found: Forecast) -> dict[str, Any]:
    return {
        "name": found.module.name,
        "mesh": str(found.module.mesh),
        "ranks": found.module.mesh.ranks,
        "pipeline": found.pipeline,
        "topology": found.topology.name,
        "notes": _notes(found),
        "phases": [_phase_facts(each) for each in found.phases],
    }


def _phase_facts(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "sizes": dict(phase.sizes),
        "tokens": phase.tokens,
        "tokens_before": phase.past,
        "memory": [asdict(memory) | {"total": memory.total} for memory in phase.memory],
        "flops": phase.cost.flops,
        "bytes": phase.cost.bytes,
        "kernels": phase.cost.kernels,
        "collectives": collective_rows(phase),
        "us": {
            "roofline": phase.roofline_us,
            "kernels": phase.kernels_us,
            "collectives": phase.collectives_us,
            "total": phase.us,
        },
    }


def collective_rows(phase: Phase) -> list[dict[str, Any]]:
    """The messages of a phase, those of one kind and size together."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in phase.messages:
        key = (each.kind, each.axis, each.ways, each.size, each.link)
        row = rows.setdefault(
            key,
            {
                "kind": each.kind,
                "axis": each.axis,
                "ranks": each.ways,
                "bytes": each.size,
                "link": each.link,
                "count": 0,
                "sent": 0.0,
                "sent_per_token": 0.0,
                "us": 0.0,
            },
        )
        row["count"] += 1
        row["sent"] += each.sent
        row["sent_per_token"] += each.sent / phase.tokens
        row["us"] += each.us
    return list(rows.values())


def _say(found: Forecast) -> None:
    mesh = found.module.mesh
    device = found.topology.device
    ranks = f"{mesh.ranks} ranks ({mesh})" if mesh.ranks > 1 else "1 rank"
    print(f"{found.module.name} on {ranks} of {device.name}, {found.topology.within}")
    for phase in found.phases:
        print(f"\n{paint(phase.name, 'bold')}: {described(phase)}")
        print(table(_memory_rows(phase, device.memory_bytes), _MEMORY))
        rows = [
            (
                f"{row['count']} x {row['kind']}",
                f"{row['axis']}, {row['ranks']} ranks",
                row["link"],
                amount(row["bytes"]),
                amount(row["sent_per_token"]),
                f"{row['us'] / 1e3:.2f} ms",
            )
            for row in collective_rows(phase)
        ]
        if rows:
            print(table(rows, _COLLECTIVES))
        print(_time(phase))
    for note in _notes(found):
        print(f"\n{note}")


def _notes(found: Forecast) -> list[str]:
    from ..analysis.idle_axes import idle_axes

    return idle_axes(found.module)


_MEMORY = ("  memory per rank", "weights", "states", "activations", "workspace", "all")
_COLLECTIVES = ("  collectives", "over", "link", "whole tensor", "sent per rank and token", "time")


def described(phase: Phase) -> str:
    """What one run is."""
    sizes = ", ".join(f"{name}={size}" for name, size in phase.sizes.items())
    if phase.name == RUN:
        return f"once ({sizes})"
    count = f"{phase.tokens} token{'s' * (phase.tokens != 1)}"
    before = f" after {phase.past} others" if phase.past else ""
    return f"{count}{before} ({sizes})"


def _memory_rows(phase: Phase, most: int) -> list[list[str]]:
    return [_memory_row(stage, memory, phase, most) for stage, memory in enumerate(phase.memory)]


def _memory_row(stage: int, memory: Memory, phase: Phase, most: int) -> list[str]:
    name = f"  stage {stage}" if len(phase.memory) > 1 else ""
    parts = (memory.weights, memory.states, memory.activations, memory.workspace)
    share = f"{amount(memory.total)} of {amount(most)}"
    if memory.total > most:
        share = paint(f"{share}: too much", "red")
    return [name, *map(amount, parts), share]


def _time(phase: Phase) -> str:
    parts = (
        ("arithmetic and memory", phase.roofline_us),
        (f"{phase.cost.kernels} kernels", phase.kernels_us),
        ("collectives", phase.collectives_us),
    )
    text = " + ".join(f"{name} {us / 1e3:.2f}" for name, us in parts)
    rate = phase.tokens / phase.us * 1e6 if phase.us else 0.0
    what = "runs" if phase.name == RUN else "tokens"
    return f"  {text} = {phase.us / 1e3:.2f} ms, {rate:,.0f} {what}/s"
