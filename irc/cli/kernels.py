"""`irc show DIR --kernels`: the kernels that TensorRT's builder made of an artifact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.units import amount
from ..artifact.folder import ArtifactFolder
from ..errors import Error
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

    if not folder.exists():
        raise Error(f"{folder} does not exist; give the folder of an artifact")
    artifact = ArtifactFolder.find(folder)
    program: Mapping[str, Any] = artifact.program if artifact else {}
    reports = [stage.get("report") for stage in program.get("stages", ())]
    if not any(reports):
        raise Error(f"{folder} has no engines; compile it with --backend tensorrt-rtx or tensorrt")
    for number, name in enumerate(reports):
        engine = next(r["engine"] for r in program["ranks"] if r["stage"] == number)
        try:
            yield engine, Report.from_json(json.loads((folder / name).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Error(f"{folder / name} is missing or damaged; compile again") from error
