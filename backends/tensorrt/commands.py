"""The part of the TensorRT backends in irc's commands: kernels, engines, plugins, libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.analysis.units import amount
from irc.artifact.folder import ArtifactFolder
from irc.backends.commands import Commands, Finding, Linted, PluginPage, Shown
from irc.errors import Error, installs, printable
from irc.report import Columns, Report, Table, markdown_table, paint, table
from irc.schema import read_json

if TYPE_CHECKING:
    from irc.backends.tensorrt.builder.report import Report as BuildReport
    from irc.backends.tensorrt.lint import Finding as LintFinding
    from irc.backends.tensorrt.plugins import Field, PluginSpec

WIDTH = 48  # of the column with the names of kernels


class EngineCommands(Commands):
    """Kernels of engines, the cache of engines, plugins, lowerings by target."""

    lints = True
    shows: Mapping[str, str] = {"kernels": "print the kernels of the engines of an artifact"}

    def show(self, flag: str, shown: Shown) -> Report:
        """The kernels of every engine and profile, or only those of a scope."""
        facts: dict[str, Any] = {}
        text: list[str | Table] = []
        for stage, report in _reports(Path(shown.source)):
            facts[stage] = report.to_json()
            for number, name in enumerate(report.profiles):
                kinds = ", ".join(f"{n} {kind}" for kind, n in report.kinds(number).items())
                memory = sum(report.activations[number : number + 1])
                text.append(f"{stage}, profile {name}: {kinds}; activations {amount(memory)}")
                rows = report.rows(number, shown.scope)
                text.append(table([(f"  {k}", kind, _short(n), ops) for k, kind, n, ops in rows]))
        return Report(facts, text)

    def cache(self, folder: Path | None, action: str) -> Report | None:
        """Engines that later compilations find."""
        from irc.backends.tensorrt.builder.cache import VARIABLE, Cache, default_folder

        folder = folder or default_folder()
        if folder is None:
            raise Error(f"this user has no home folder for a cache of engines; set {VARIABLE}")
        cache = Cache(folder)
        entries = cache.clear() if action == "clear" else cache.entries()
        reports = {entry.key: cache.report(entry.key) for entry in entries}
        rows = [
            asdict(each) | {"target": "damaged" if (r := reports[each.key]) is None else r.target}
            for each in entries
        ]
        size = sum(entry.size for entry in entries)
        facts = {"folder": str(folder), "limit": cache.limit, "engines": len(rows), "size": size}
        facts |= {"list": rows} if action == "list" else {}
        engines = f"{len(rows)} engine{'' if len(rows) == 1 else 's'}, {amount(size)}"
        if action == "clear":
            return Report(facts, [f"{folder}: deleted {engines}"])
        listed = [Table(rows, _ENGINES)] if action == "list" and rows else []
        return Report(facts, [*listed, f"{folder}: {engines} of at most {amount(cache.limit)}"])

    def load_plugins(self, files: Sequence[str]) -> None:
        """Run the user's files that register plugins."""
        from irc.backends.tensorrt.plugins import load

        load(files)

    def plugins(self) -> Sequence[PluginPage]:
        """The registered plugins, by name."""
        from irc.backends.tensorrt.plugins import SPECS, display_name

        return [
            PluginPage(
                display_name(*key),
                (display_name(*key), spec.name),
                spec.version,
                spec.doc.strip().partition("\n")[0],
                _facts(spec),
                page(spec),
            )
            for key, spec in sorted(SPECS.items())
        ]

    def importable(self) -> Mapping[Any, tuple[str, Callable[..., Any]]]:
        """The nodes of plugins that say of which operation they are."""
        from functools import partial

        from irc.backends.tensorrt.plugins import fields_of, users

        return {spec.key: (spec.operation, partial(fields_of, spec)) for spec in users()}

    def lowerings(self, target: str, op: str | None, markdown: bool) -> Report | None:
        """The table of lowerings for a target of TensorRT."""
        from irc.backends.tensorrt.lowering import table as choices
        from irc.backends.tensorrt.target import Target

        parsed = Target.parse(target)
        rows = [asdict(row) for row in choices.rows(parsed) if op in (None, row.op)]
        cells = [[row["op"], row["choice"], row["reason"], row["source"]] for row in rows]
        if markdown:
            cells = [[f"`{name}`", *rest] for name, *rest in cells]
        show = markdown_table if markdown else table
        text = [show(cells, ["operation", "becomes", "reason", "source"])]
        if op is None:
            refused = [[name, why] for name, why in choices.unknown_dtypes(parsed).items()]
            heading = ["dtype", "operations of this dtype are refused or expanded"]
            text.append(f"\n{show(refused, heading)}")
        return Report(rows, text, notes=[parsed.note] if parsed.note else [])

    def lint(self, linted: Linted) -> Report:
        """The findings about each model, and whether irc itself reads it."""
        from irc.backends.tensorrt.lint import Unreadable, lint_file

        facts: list[dict[str, Any]] = []
        text: list[str] = []
        refused: dict[str, str] = {}
        for path in linted.models:
            try:
                findings = lint_file(path, linted.ignore)
            except Unreadable:
                linted.check_bytes(path)
                raise
            facts += [{"file": str(path), **asdict(each)} for each in findings]
            text += _linted(path, findings, linted.every_node)
            if why := linted.refusal(path):
                refused[str(path)] = why
                text.append(f"  note: irc compile does not read this file: {why}")
        errors = any(each["severity"] == "error" for each in facts)
        answer = {"ok": not errors, "findings": facts, "refused_by_irc": refused}
        return Report(answer, text, int(errors))

    def rules(self) -> Report:
        """The rules: message, with … for values of the model, and source."""
        from irc.backends.tensorrt.lint import RULES

        texts = {
            name: rule.message.replace("{kind}", "this operator") for name, rule in RULES.items()
        }
        rows = [
            {
                "name": name,
                "severity": rule.severity,
                "operators": rule.operators,
                "message": re.sub(r"\{[^}]*\}", "…", texts[name]),
                "source": rule.source,
            }
            for name, rule in sorted(RULES.items())
        ]
        return Report(rows, [Table(rows, _RULES)])

    def findings(self) -> Sequence[Finding]:
        """Whether the libraries of engines load and are new enough, and a driver runs them."""
        from irc.backends.tensorrt.builder.library import TRAITS, find, installed

        findings: list[Finding] = []
        for flavour, traits in TRAITS.items():
            purpose = f"engines of {traits.name}"
            if not installed(flavour):
                get = f"not installed ({purpose}): {installs(traits.extra)}"
                findings.append(Finding(flavour, None, get))
                continue
            try:
                findings.append(Finding(flavour, True, f"{find(flavour).version} ({purpose})"))
            except Error as error:
                findings.append(Finding(flavour, False, str(error)))
        return [*findings, _driver()]


_ENGINES: Columns = {
    "engine": "{key:.12}",
    "size": "{size:bytes}",
    "last used": lambda row: f"{datetime.fromtimestamp(row['used']):%Y-%m-%d %H:%M}",
    "target": "{target}",
}


_RULES = {"rule": "{name}", "severity": "{severity}", "message": "{message}", "source": "{source}"}


def _linted(path: Path, findings: Sequence[LintFinding], every_node: bool) -> list[str]:
    """The findings about one model, those with one rule and message together."""
    from irc.backends.tensorrt.lint.rules import grouped

    errors = sum(each.severity == "error" for each in findings)
    numbers = (("error", errors), ("warning", len(findings) - errors))
    counts = ", ".join(f"{n} {noun}{'s' * (n > 1)}" for noun, n in numbers if n)
    lines = [f"{path}: {counts or 'no findings'}"]
    for group in grouped(findings):
        colour = "red" if group.severity == "error" else "yellow"
        lines.append(f"  {paint(group.severity, colour)} {printable(group.sentence)}")
        lines += [f"    {printable(line)}" for line in group.lines(every_node)]
    return lines


def _short(kernel: str) -> str:
    """A kernel's name without its hash, truncated to WIDTH."""
    return re.sub(r"_0x[0-9a-f]{16,}.*", "", kernel)[:WIDTH]


def _reports(folder: Path) -> Iterator[tuple[str, BuildReport]]:
    """(engine, report) of every stage; an Error if there are no engines."""
    from irc.backends.tensorrt.builder.report import Report as BuildReport
    from irc.backends.tensorrt.facts import EngineFacts

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
        yield engine, read_json(folder / name, BuildReport)


def _driver() -> Finding:
    """Whether engines can run here. Building them for TensorRT-RTX needs no GPU."""
    from irc.backends.cuda.runtime import device_count, driver_version

    version, count = driver_version(), device_count()
    if version is None:
        without = "none: programs for GPUs are compiled here, but not run"
        return Finding("gpu driver", None, without)
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return Finding("gpu driver", True if count else None, f"{cuda}, {count} GPUs")


def page(spec: PluginSpec) -> str:
    """Markdown: the doc of a plugin, its fields, its tensors."""
    about = f"version {spec.version}, namespace `{spec.namespace}`"
    parts = [f"# {spec.name}", about, spec.doc.strip()]
    if spec.fields:
        rows = [(f"`{each.name}`", each.type, *_details(each)) for each in spec.fields]
        parts.append("## Fields (string attributes of the node)")
        parts.append(markdown_table(rows, ("name", "type", "default", "what")))
    parts += ["## Tensors", _tensors(spec)]
    kinds = [(f"`{name}`", " ".join(types)) for name, types in spec.types.items()]
    if kinds:
        parts.append(markdown_table(kinds, ("dtype", "one of")))
    if spec.operation:
        parts.append(f"Nodes in ONNX files are imported as the operation `{spec.operation}`.")
    return "\n\n".join(parts) + "\n"


def _default(field: Field) -> str | None:
    return None if field.default is None else str(field.parsed(field.default))


def _details(field: Field) -> tuple[str, str]:
    default = "required" if field.default is None else f"`{_default(field)}`"
    return default, field.doc + (f" ({', '.join(field.choices)})" if field.choices else "")


def _tensors(spec: PluginSpec) -> str:
    rows: list[tuple[str, ...]] = []
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        if callable(tensors):
            rows.append((kind, "", "", "depends on the fields, see above"))
        else:
            rows += [(kind, f"`{each.name}`", each.dtype, each.doc) for each in tensors]
    return markdown_table(rows, ("", "name", "dtype", "what"))


def _facts(spec: PluginSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "namespace": spec.namespace,
        "version": spec.version,
        "operation": spec.operation or None,
        "summary": spec.doc.strip().partition("\n")[0],
        "fields": [
            {
                "name": field.name,
                "type": field.type,
                "default": _default(field),
                "choices": list(field.choices),
                "what": field.doc,
            }
            for field in spec.fields
        ],
    }
