"""`irc show DIR --kernels`: the kernels that TensorRT's builder made of an artifact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.units import amount
from ..artifact.folder import ArtifactFolder
from ..errors import Error
from ..schema import read_json
from .console import print_json, table

if TYPE_CHECKING:
    from ..backends.tensorrt.builder.report import Report

WIDTH = 48  # of the column with the names of kernels


def show_kernels(source: str, scope: str | None, as_json: bool) -> int:
    """Print the kernels of every engine and profile, or only those of a scope."""
    found = list(_reports(Path(source)))
    if as_json:
        print_json({stage: report.to_json() for stage, report in found})
        return 0
    for stage, report in found:
        for number, name in enumerate(report.profiles):
            rows = report.rows(number, scope)
            kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds(number).items())
            memory = sum(report.activations[number : number + 1])
            print(f"{stage}, profile {name}: {kinds}; activations {amount(memory)}")
            print(table([(f"  {k}", kind, _short(name), ops) for k, kind, name, ops in rows]))
    return 0


def _short(kernel: str) -> str:
    """A kernel's name without its hash, truncated to WIDTH."""
    return re.sub(r"_0x[0-9a-f]{16,}.*", "", kernel)[:WIDTH]


def _reports(folder: Path) -> Iterator[tuple[str, Report]]:
    """(engine, report) of every stage; an Error if there are no engines."""
    from ..backends.tensorrt.builder.report import Report
    from ..backends.tensorrt.facts import EngineFacts

    if not folder.exists():
        raise Error(f"{folder} does not exist; give the folder of an artifact")
    artifact = ArtifactFolder.find(folder)
    if artifact is None or "engine" not in artifact.program:
        raise Error(f"{folder} has no engines; compile it with --backend tensorrt-rtx or tensorrt")
    program = artifact.facts(EngineFacts)
    engines = {rank["stage"]: rank["engine"] for rank in program["ranks"]}
    for number, stage in enumerate(program["stages"]):
        engine, name = engines.get(number), stage["report"]
        if engine is None or name is None:
            raise Error(f"{folder} has no engine of stage {number}; compile without --no-build")
        yield engine, read_json(folder / name, Report)
