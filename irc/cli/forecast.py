"""`irc forecast`: estimates memory, traffic and times per rank; nothing is built."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..analysis.idle_axes import idle_axes
from ..analysis.units import amount, counted
from ..report import Columns, Report, Table, paint
from .arguments import Parser, add_compilation, add_json, given_settings, whole_number
from .console import Progress, answer

if TYPE_CHECKING:
    from ..analysis.communication import Message
    from ..analysis.forecast import Phase
    from ..analysis.memory import Memory
    from ..driver.forecast import Forecast

RUN = "run"  # the phase of a module that is not a language model

EXAMPLES = """
  irc forecast Meta-Llama-3-70B --mesh tp=8
  irc forecast Meta-Llama-3-70B --mesh pp=2,tp=4 --tokens 4096 --dims B=16,C=8192
  irc forecast examples/two_tower.py --link pcie --json

A checkpoint folder needs no more than its config.json.
"""


def configure(parser: Parser) -> None:
    """The arguments of `irc forecast`."""
    add = parser.add_argument
    add("source", metavar="SRC", help="script.py[:factory], a folder with config.json, module.irc")
    general = "checkpoint adapter dtype settings dims backend pipeline mesh"
    parser.set_defaults(names=add_compilation(parser, *general.split()))
    add("--tokens", metavar="N", type=whole_number(1), help="tokens of the prompt (S typical)")
    add("--topology", metavar="FILE", help="the costs of the machine (default: 8 H200)")
    add("--link", metavar="NAME", help="the link within a host: nvlink, pcie or ethernet")
    add_json(parser)


def run(args: Namespace) -> int:
    """Forecast and print."""
    from ..analysis.topology_file import default_topology, read_topology
    from ..driver.forecast import forecast

    topology = read_topology(args.topology) if args.topology else default_topology()
    if args.link:
        topology = topology.using(args.link)
    with Progress() as progress:
        progress(f"forecasting {args.source}")
        result = forecast(args.source, topology, args.tokens, **given_settings(args, args.names))
    return answer(args, Report(_facts(result), _lines(result)))


def _facts(result: Forecast) -> dict[str, Any]:
    return {
        "name": result.module.name,
        "mesh": str(result.module.mesh),
        "ranks": result.module.mesh.ranks,
        "pipeline": result.pipeline,
        "topology": result.topology.name,
        "notes": idle_axes(result.module),
        "phases": [_phase_facts(phase) for phase in result.phases],
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
    """The messages of a phase, grouped by kind, axis, size and link."""
    groups: dict[tuple[Any, ...], list[Message]] = {}
    for sending in phase.messages:
        key = (sending.kind, sending.axis, sending.group_size, sending.size, sending.link)
        groups.setdefault(key, []).append(sending)
    rows: list[dict[str, Any]] = []
    for key, group in groups.items():
        sent = sum(sending.sent for sending in group)
        row = dict(zip(("kind", "axis", "ranks", "bytes", "link"), key, strict=True))
        row |= {"count": len(group), "sent": sent, "sent_per_token": sent / phase.tokens}
        rows.append(row | {"us": sum(sending.us for sending in group)})
    return rows


def _lines(result: Forecast) -> list[str | Table]:
    mesh = result.module.mesh
    device = result.topology.device
    ranks = f"{mesh.ranks} ranks ({mesh})" if mesh.ranks > 1 else "1 rank"
    lines: list[str | Table] = [
        f"{result.module.name} on {ranks} of {device.name}, {result.topology.within}"
    ]
    for phase in result.phases:
        lines.append(f"\n{paint(phase.name, 'bold')}: {_described(phase)}")
        rows = [_memory_row(i, m, phase, device.memory_bytes) for i, m in enumerate(phase.memory)]
        lines.append(Table(rows, _MEMORY))
        lines += [Table(collective_rows(phase), _COLLECTIVES)] if phase.messages else []
        lines.append(_time(phase))
    return [*lines, *(f"\n{note}" for note in idle_axes(result.module))]


_MEMORY = {
    "  memory per rank": "{name}",
    "weights": "{weights:bytes}",
    "states": "{states:bytes}",
    "activations": "{activations:bytes}",
    "workspace": "{workspace:bytes}",
    "all": "{all}",
}
_COLLECTIVES: Columns = {
    "  collectives": "{count} x {kind}",
    "over": "{axis}, {ranks} ranks",
    "link": "{link}",
    "full tensor": "{bytes:bytes}",
    "sent per rank and token": "{sent_per_token:bytes}",
    "time": lambda row: f"{row['us'] / 1e3:.2f} ms",
}


def _described(phase: Phase) -> str:
    """The tokens and sizes of a phase."""
    sizes = ", ".join(f"{name}={size}" for name, size in phase.sizes.items())
    if phase.name == RUN:
        return f"once ({sizes})"
    before = f" after {phase.past} others" if phase.past else ""
    return f"{counted(phase.tokens, 'token')}{before} ({sizes})"


def _memory_row(stage: int, memory: Memory, phase: Phase, most: int) -> dict[str, Any]:
    name = f"  stage {stage}" if len(phase.memory) > 1 else ""
    share = f"{amount(memory.total)} of {amount(most)}"
    if memory.total > most:
        share = paint(f"{share}: too much", "red")
    return {**asdict(memory), "name": name, "all": share}


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
