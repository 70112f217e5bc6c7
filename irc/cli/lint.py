"""`irc lint`: what TensorRT would refuse, drop or miscompute in ONNX models."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error
from .arguments import add_json, add_plugin
from .console import paint, print_json, table

if TYPE_CHECKING:
    from ..backends.tensorrt.lint import Finding
    from ..backends.tensorrt.target import Target

EXAMPLES = """
  irc lint model.onnx
  irc lint build/llama --target tensorrt-11.4/sm_90
  irc lint model.onnx --plugin my_plugin.py
  irc lint model.onnx --ignore attention-causal-alignment --json
  irc lint --rules
"""

TARGET = "tensorrt-rtx"


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc lint`."""
    parser.add_argument(
        "source", metavar="FILE|DIR", nargs="?", help="an ONNX model, or an artifact folder"
    )
    parser.add_argument(
        "--target",
        metavar="T",
        help=f"library, version and GPUs ({TARGET}, or what the artifact is for)",
    )
    parser.add_argument(
        "--ignore", metavar="RULE", action="append", default=[], help="leave a rule out"
    )
    parser.add_argument("--all", action="store_true", help="every node of every finding")
    parser.add_argument("--rules", action="store_true", help="list the rules for the target")
    add_plugin(parser.add_argument)
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if no model has an error, else 1."""
    from ..backends.tensorrt.plugins import load

    load(args.plugin)
    if args.rules:
        return _rules(args)
    if args.source is None:
        raise Error("say which model: irc lint model.onnx, or irc lint DIR")
    target = _target(args)
    found = {
        path: _findings(path, target, tuple(args.ignore)) for path in models(Path(args.source))
    }
    errors = sum(each.severity == "error" for every in found.values() for each in every)
    if args.json:
        listed = [{"file": str(p), **asdict(each)} for p, every in found.items() for each in every]
        print_json({"target": str(target), "ok": not errors, "findings": listed})
        return int(errors > 0)
    for path, every in found.items():
        _print(path, every, target, args.all)
    return int(errors > 0)


def _findings(path: Path, target: Target, ignore: tuple[str, ...]) -> list[Finding]:
    """The findings about a file; an Error says at which byte it breaks, where that is known."""
    from ..backends.tensorrt.lint import Unreadable, lint_file
    from ..frontends.onnx.wire import without_data

    try:
        return lint_file(path, target, ignore)
    except Unreadable:
        without_data(path.read_bytes(), str(path))
        raise


def models(source: Path) -> list[Path]:
    """The ONNX models of a folder, or the one that is named; an Error for other sources."""
    from ..driver.sources import is_script

    if not source.is_dir():
        if source.suffix == ".irc" or is_script(str(source)):
            raise Error(
                f"{source} is no ONNX model; irc lint reads ONNX models and artifact folders: "
                f"irc compile {source} -o DIR, then irc lint DIR"
            )
        return [source]
    found = sorted(source.glob("*.onnx"))
    if not found:
        raise Error(f"{source} holds no .onnx file; compile with --backend onnx or tensorrt-rtx")
    return found


def _target(args: Namespace) -> Target:
    """The target that is asked for, that of the artifact, or tensorrt-rtx."""
    from ..artifact import is_artifact, read_manifest
    from ..backends.tensorrt.target import Target

    if args.target is not None:
        return Target.parse(args.target)
    if args.source is not None and is_artifact(Path(args.source)):
        own = read_manifest(Path(args.source))["program"].get("target")
        if isinstance(own, str):
            return Target.parse(own)
    return Target.parse(TARGET)


def _print(path: Path, findings: list[Finding], target: Target, all_nodes: bool) -> None:
    """The findings about one model, those of one rule and sentence together."""
    from ..backends.tensorrt.lint.grouping import grouped

    errors = sum(each.severity == "error" for each in findings)
    counts = [_count(errors, "error"), _count(len(findings) - errors, "warning")]
    print(f"{path}: {', '.join(filter(None, counts)) or f'no findings for {target}'}")
    for group in grouped(findings):
        colour = "red" if group.severity == "error" else "yellow"
        print(f"  {paint(group.severity, colour)} {group.sentence}")
        for line in group.lines(all_nodes):
            print(f"    {line}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


def _rules(args: Namespace) -> int:
    """The rules that hold for the target, with what they rest on."""
    from ..backends.tensorrt.lint import RULES

    target = _target(args)
    held = [rule for _, rule in sorted(RULES.items()) if rule.holds(target)]
    if args.json:
        keys = ("name", "severity", "reason", "source")
        print_json([{key: getattr(rule, key) for key in keys} for rule in held])
        return 0
    rows = [
        (rule.name, rule.severity, rule.reason.partition("\n")[0], rule.source) for rule in held
    ]
    print(table(rows, ["rule", "severity", "reason", "source"]))
    return 0
