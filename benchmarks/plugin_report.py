"""The results of benchmarks/plugin_collectives.py, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WITHIN = 10.0  # seconds in which a lost rank is to be an error on every other one
OVER = 2.0  # microseconds that the plugin may take over the bare call
LOSING = ("kill", "stop", "a rank")


def summary(phase: dict[str, Any]) -> str:
    """One line: right, or WRONG with the first thing that is."""
    if phase.get("skipped"):
        return "skipped, no time left"
    problems = list(wrong(phase))
    if problems:
        return f"WRONG, {len(problems)} of them: {problems[0]}"
    if timings := [each for each in everything(phase) if "timed" in each]:
        return ", ".join(f"{how}: {slow(timings, how)}" for how in ("graph", "stream"))
    if checked := [each for each in everything(phase) if "case" in each]:
        return f"right, {len(checked)} results of ranks compared"
    return "right"


def slow(timings: list[dict[str, Any]], how: str) -> str:
    """The collectives whose plugin takes more than the target over the bare call, on any rank."""
    most: dict[str, float] = {}
    for each in timings:
        if each["timed"] != "all_reduce_rms_norm":
            name = f"{each['timed']} of {each['bytes'] >> 10} KB"
            most[name] = max(each[f"{how}_over"], most.get(name, -1e9))
    over = [f"{name} {us:+.1f}" for name, us in most.items() if us > OVER]
    return f"more than {OVER:.0f} us over for {', '.join(over)}" if over else "within the target"


def everything(phase: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The reports of all ranks."""
    for rank, reports in enumerate(phase.get("reports", ())):
        for each in reports:
            yield {"by": rank, **each}


def wrong(phase: dict[str, Any]) -> Iterator[str]:
    """Everything that is wrong."""
    for each in everything(phase):
        if "failed" in each:
            yield f"rank {each['by']} failed: {each['failed'].splitlines()[-1:]}"
        if each.get("problem"):
            yield f"rank {each['by']}, group {each['group']}: {each['problem']}"
    if phase["late"]:
        yield f"ranks {phase['late']} did not end in {phase['seconds']:.0f} seconds"
    if not phase["phase"].startswith(LOSING):
        return
    for rank, seconds, message in losses(phase):
        if not message:
            yield f"rank {rank} did not notice"
        elif seconds > WITHIN:
            yield f"rank {rank} noticed after {seconds:.1f} seconds"


def losses(phase: dict[str, Any]) -> Iterator[tuple[int, float, str]]:
    """(rank, seconds from the loss to the error, the error)."""
    for each in everything(phase):
        if "lost" in each:
            since = phase.get("struck")
            seconds = each["at"] - since if since else each.get("seconds", 0.0)
            yield each["by"], seconds, each["lost"]


def markdown(results: dict[str, Any]) -> str:
    """The whole page."""
    about = next(
        (each for phase in results["phases"] for each in everything(phase) if "gpu" in each), {}
    )
    parts = [
        "# IrcCollective on GPUs",
        f"{results['ranks']} x {about.get('gpu', '?')}, NCCL {about.get('nccl', '?')}; "
        f"seed {results['seed']}; `python -m benchmarks.plugin_collectives`.",
        "## Phases",
        table(
            ("phase", "result", "seconds"),
            [(p["phase"], summary(p), f"{p.get('seconds', 0):.1f}") for p in results["phases"]],
        ),
    ]
    for phase in results["phases"]:
        if phase["phase"] == "check":
            parts += ["## Right results", counts(phase)]
        if phase["phase"] == "overhead":
            parts += ["## Time over the bare call of NCCL", times(phase)]
    parts += ["## Lost ranks", lost(results)]
    return "\n\n".join(parts) + "\n"


def counts(phase: dict[str, Any]) -> str:
    """Right of all, by operation and group."""
    found: dict[tuple[str, str], list[bool]] = {}
    for each in everything(phase):
        if "case" in each:
            key = (each["case"].split()[0], each["group"])
            found.setdefault(key, []).append(not each["problem"])
    rows = [(op, group, f"{sum(ok)} of {len(ok)}") for (op, group), ok in found.items()]
    return table(("operation", "group", "right"), rows)


def times(phase: dict[str, Any]) -> str:
    """Microseconds: the slowest rank's, and the median and greatest difference over ranks."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for each in everything(phase):
        if "timed" in each:
            found.setdefault((each["timed"], each["bytes"]), []).append(each)
    rows: list[tuple[str, ...]] = []
    for (operation, size), ranks in found.items():
        row = [operation, f"{size >> 10} KB"]
        for how in ("graph", "stream"):
            overs = sorted(each[f"{how}_over"] for each in ranks)
            row += [f"{max(each[f'{how}_{key}'] for each in ranks):.1f}" for key in WHO]
            row += [f"{overs[len(overs) // 2]:+.2f}", f"{overs[-1]:+.2f}"]
        rows.append(tuple(row))
    head = ["operation", "a rank's operand"]
    for how in ("graph", "stream"):
        head += [f"{how}: bare us", "plugin us", "over, median", "over, most"]
    parts = [table(head, rows), "Bare for all_reduce_rms_norm is the all_reduce alone."]
    parts += ["On ranks other than the root, reduce and gather also write zeros."]
    return "\n\n".join(parts)


WHO = ("bare", "plugin")


def lost(results: dict[str, Any]) -> str:
    """When each rank noticed, and its error."""
    rows = [
        (phase["phase"], str(rank), f"{seconds:.1f}", message.replace("|", "/"))
        for phase in results["phases"]
        if not phase.get("skipped") and phase["phase"].startswith(LOSING)
        for rank, seconds, message in losses(phase)
    ]
    return table(("phase", "rank", "seconds", "error"), rows)


def table(head: Any, rows: Any) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
