"""`irc lint`: what TensorRT would drop or miscompute in ONNX models; names in scripts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from ..errors import Error, printable
from ..report import Report, paint
from .arguments import add_json, add_tensorrt_llm
from .console import answer

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
    from ..backends import command_parts
    from ..backends.commands import Linted
    from ..frontends.script import mentions_tensorrt_llm

    (part,) = (part for part in command_parts() if part.lints)
    if args.rules:
        return answer(args, part.rules())
    if args.source is None:
        raise Error("say which model: irc lint model.onnx, irc lint DIR, or irc lint script.py")
    if mentions_tensorrt_llm(args.source):
        return answer(args, _script(args))
    linted = Linted(models(Path(args.source)), args.ignore, args.all, _refusal, _check_bytes)
    return answer(args, part.lint(linted))


def _script(args: Namespace) -> Report:
    """Status 0 if irc takes every use of TensorRT-LLM in a script. The script is not run."""
    from ..frontends.tensorrt_llm.lint import as_rows, lint_script

    report = lint_script(args.source, args.tensorrt_llm, args.tensorrt_llm_sources)
    complete = report.score == 1
    uses = [asdict(use) for use in report.uses]
    facts = {"score": report.score, "ok": complete, "version": report.release, "uses": uses}
    shown = [(use, lines) for use, lines in as_rows(report) if args.all or use.status in _WORK]
    text: list[str] = []
    for use, lines in shown:
        where = f"{args.source}:{','.join(map(str, lines))}"
        colour = _COLOURS.get(use.status, "red")
        why = printable(f": {use.why}" * bool(use.why))
        text.append(f"{where}: {printable(use.name)}: {paint(use.status, colour)}{why}")
    count = f"{len(report.uses)} uses of TensorRT-LLM" if report.uses else "no use of TensorRT-LLM"
    hint = "" if args.all else "; --all lists the supported names too"
    version = f" {report.release}" if report.uses else ""
    text.append(f"{args.source}: {count}{version}, {report.score:.0%} taken{hint}")
    return Report(facts, text, int(not complete))


def _check_bytes(path: Path) -> None:
    """An Error that names the damaged byte of an ONNX file, where it is known."""
    from ..frontends.onnx.protobuf import without_data

    without_data(path.read_bytes(), str(path))


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
                f"{source} is not an ONNX model; irc lint reads ONNX models and artifact folders: "
                f"irc compile {source} -o DIR, then irc lint DIR"
            )
        return [source]
    models = sorted(source.glob("*.onnx"))
    if not models:
        advice = "name an ONNX model, or an artifact folder of the backend onnx or tensorrt-rtx"
        if (source / "config.json").exists() and ArtifactFolder.find(source) is None:
            config = read_config(source)
            _ = is_of_tensorrt_llm(config) or model_of(config)  # an Error that says what helps
            advice = f"irc compile {source} -o DIR --backend tensorrt-rtx, then irc lint DIR"
        raise Error(f"{source} holds no .onnx file; {advice}")
    return models
