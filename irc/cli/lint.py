"""`irc lint`: what TensorRT would drop or miscompute in ONNX models; names in scripts."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error, printable
from ..report import table
from .arguments import add_json, add_tensorrt_llm
from .console import paint, print_json

if TYPE_CHECKING:
    from ..backends.tensorrt.lint import Finding

EXAMPLES = """
  irc lint model.onnx
  irc lint build/llama
  irc lint model.onnx --ignore attention-causal-alignment --json
  irc lint --rules
  irc lint tensorrt_llm_build.py
"""

_WORK = ("refused", "unknown", "unchecked", "only when off", "without effect")
_COLOURS = {"supported": "green", **dict.fromkeys(_WORK[2:], "yellow")}


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc lint`."""
    add = parser.add_argument
    what = "an ONNX model, an artifact folder, or a Python script that uses TensorRT-LLM"
    add("source", metavar="FILE|DIR", nargs="?", help=what)
    add("--ignore", metavar="RULE", action="append", default=[], help="a rule to skip")
    add("--all", action="store_true", help="list every node of every finding")
    add("--rules", action="store_true", help="list the rules")
    add_tensorrt_llm(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if no model has an error, else 1."""
    from ..frontends.script import mentions_tensorrt_llm

    if args.rules:
        return _rules(args.json)
    if args.source is None:
        raise Error("say which model: irc lint model.onnx, irc lint DIR, or irc lint script.py")
    if mentions_tensorrt_llm(args.source):
        return _script(args)
    found = {path: _findings(path, args.ignore) for path in models(Path(args.source))}
    errors = sum(each.severity == "error" for every in found.values() for each in every)
    refused = {path: why for path in found if (why := _refusal(path))}
    if args.json:
        listed = [{"file": str(p), **asdict(each)} for p, every in found.items() for each in every]
        unread = {"refused_by_irc": {str(path): why for path, why in refused.items()}}
        print_json({"ok": not errors, "findings": listed} | unread)
        return int(errors > 0)
    for path, every in found.items():
        _print(path, every, args.all)
        if path in refused:
            print(f"  note: irc compile does not read this file: {refused[path]}")
    return int(errors > 0)


def _script(args: Namespace) -> int:
    """0 if irc takes every use of TensorRT-LLM in a script, else 1. The script is not run."""
    from ..frontends.tensorrt_llm.lint import as_rows, lint_script

    report = lint_script(args.source, args.tensorrt_llm, args.tensorrt_llm_sources)
    complete = report.score == 1
    if args.json:
        uses = [asdict(use) for use in report.uses]
        print_json({"score": report.score, "ok": complete, "version": report.release, "uses": uses})
        return int(not complete)
    shown = [(use, lines) for use, lines in as_rows(report) if args.all or use.status in _WORK]
    for use, lines in shown:
        where = f"{args.source}:{','.join(map(str, lines))}"
        colour = _COLOURS.get(use.status, "red")
        why = printable(f": {use.why}" * bool(use.why))
        print(f"{where}: {printable(use.name)}: {paint(use.status, colour)}{why}")
    count = f"{len(report.uses)} uses of TensorRT-LLM" if report.uses else "no use of TensorRT-LLM"
    hint = "" if args.all else "; --all lists the supported names too"
    version = f" {report.release}" if report.uses else ""
    print(f"{args.source}: {count}{version}, {report.score:.0%} taken{hint}")
    return int(not complete)


def _findings(path: Path, ignore: list[str]) -> list[Finding]:
    """The findings about a file; the Error about a damaged one names the byte, where known."""
    from ..backends.tensorrt.lint import Unreadable, lint_file
    from ..frontends.onnx.protobuf import without_data

    try:
        return lint_file(path, ignore)
    except Unreadable:
        without_data(path.read_bytes(), str(path))
        raise


def _refusal(path: Path) -> str:
    """Why irc itself cannot compile a model, or ""; nothing about files of artifacts."""
    from ..artifact.folder import ArtifactFolder
    from ..driver.sources import read_module

    if ArtifactFolder.find(path.parent) is None and path.suffix == ".onnx":
        try:
            read_module(path)
        except Error as error:
            return str(error)
    return ""


def models(source: Path) -> list[Path]:
    """The ONNX models of a folder, or the one that is named; an Error for other sources."""
    from ..artifact.folder import ArtifactFolder
    from ..driver.sources import check_source, is_script
    from ..frontends.huggingface.config import is_of_tensorrt_llm, model_of, read_config

    check_source(source)
    if source.suffix == ".py" and not source.exists():
        raise Error(f"there is no script {source}")
    if not source.is_dir():
        if source.suffix == ".irc" or is_script(str(source)):
            raise Error(
                f"{source} is no ONNX model; irc lint reads ONNX models and artifact folders: "
                f"irc compile {source} -o DIR, then irc lint DIR"
            )
        return [source]
    found = sorted(source.glob("*.onnx"))
    if not found:
        advice = "name an ONNX model, or an artifact folder of the backend onnx or tensorrt-rtx"
        if (source / "config.json").exists() and ArtifactFolder.find(source) is None:
            config = read_config(source)
            _ = is_of_tensorrt_llm(config) or model_of(config)  # an Error that says what helps
            advice = f"irc compile {source} -o DIR --backend tensorrt-rtx, then irc lint DIR"
        raise Error(f"{source} holds no .onnx file; {advice}")
    return found


def _print(path: Path, findings: list[Finding], all_nodes: bool) -> None:
    """The findings about one model, those with one rule and message together."""
    from ..backends.tensorrt.lint.rules import grouped

    errors = sum(each.severity == "error" for each in findings)
    numbers = (("error", errors), ("warning", len(findings) - errors))
    counts = ", ".join(f"{n} {noun}{'s' * (n > 1)}" for noun, n in numbers if n)
    print(f"{path}: {counts or 'no findings'}")
    for group in grouped(findings):
        colour = "red" if group.severity == "error" else "yellow"
        print(f"  {paint(group.severity, colour)} {printable(group.sentence)}")
        for line in group.lines(all_nodes):
            print(f"    {printable(line)}")


def _rules(as_json: bool) -> int:
    """List the rules: message, with … for values of the model, and source."""
    from ..backends.tensorrt.lint import RULES

    rows = [
        {
            "name": name,
            "severity": rule.severity,
            "operators": rule.operators,
            "message": re.sub(r"\{[^}]*\}", "…", rule.message.replace("{kind}", "this operator")),
            "source": rule.source,
        }
        for name, rule in sorted(RULES.items())
    ]
    if as_json:
        print_json(rows)
        return 0
    columns = ("name", "severity", "message", "source")
    cells = [[str(row[column]) for column in columns] for row in rows]
    print(table(cells, ["rule", *columns[1:]]))
    return 0
