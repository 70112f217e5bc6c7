"""Entry point of the command line: finds the command, and turns what goes wrong into sentences."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from .. import __version__
from ..errors import Error, did_you_mean
from .arguments import Parser, Usage, add_load
from .console import error_line, warn
from .rank import Process
from .signals import INTERRUPTED, TERMINATED, Signals

# Every command is the module of its name here, with EXAMPLES, configure(parser) and run(args).
COMMANDS = {
    "compile": "write an artifact folder from a script, a checkpoint folder or a module",
    "run": "run an artifact on arrays from an .npz file",
    "generate": "let a compiled language model continue a prompt",
    "opt": "run passes over a module: text in, text out",
    "show": "print the module of a file or an artifact, or a part of it",
    "diff": "compare two modules",
    "lint": "tell what TensorRT would refuse or miscompute in an ONNX model",
    "ops": "list the operations and which backend has them",
    "passes": "list the passes and their options",
    "plugins": "list the plugins of engines, and tell all about one",
    "forecast": "tell memory, bytes on the wire and times per rank, before anything is built",
    "bench": "measure this machine: collectives between its GPUs or its cores",
    "doctor": "check the installation, and an artifact's files",
}
_HELP = ("-h", "--help", "help")
_OUR_FAULT = 70


def main(argv: list[str] | None = None) -> int:
    """Run one command. 0: it worked, 1: the user has to change something, 2: wrong usage."""
    process = Process.of_program() if argv is None else Process(argv)
    status = TERMINATED
    try:
        status = _answer(process)
    finally:
        process.end(status)
    return status


def _answer(process: Process) -> int:
    signals = Signals()
    try:
        with signals.heeded():
            status = _dispatch(process.words, process)
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        # Code inside an extension module may turn a signal into an error of its own.
        status = signals.status or _answer_to(error, process.words)
    status = signals.status or status
    if status == INTERRUPTED:
        warn("\ninterrupted")
    return status


def _answer_to(error: Exception, words: list[str]) -> int:
    """Say what went wrong, and what to do about it; the exit status."""
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 0
    if isinstance(error, Usage):
        warn(error_line(str(error)))
        warn(f"{error.hint}")
        return 2
    _debug(error)
    if isinstance(error, Error):
        warn(error_line(str(error)))
        return 1
    if isinstance(error, OSError):
        warn(error_line(_sentence(error)))
        _drop_output()
        return 1
    package = _missing_package(error)
    if package:
        warn(error_line(f"the package {package} is not installed: pip install {package}"))
        return 1
    from .crash import apology

    warn(error_line(apology(error, words)))
    return _OUR_FAULT


def _dispatch(words: list[str], process: Process) -> int:
    if not words:
        warn(overview())
        return 2
    name, *rest = words
    if name in _HELP:
        if rest and rest[0] in COMMANDS:
            return _dispatch([rest[0], "--help"], process)
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"irc {__version__}")
        return 0
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise Usage(f"no {what} called {name!r}{did_you_mean(name, COMMANDS)}")
    command: Any = import_module(f".{name}", __package__)
    parser = Parser(name, COMMANDS[name], command.EXAMPLES)
    command.configure(parser)
    add_load(parser)
    try:
        args = parser.parse(rest)
    except SystemExit as asked:  # argparse has printed the help
        return int(asked.code or 0)
    if args.load:
        from ..pipeline import load_file

        for file in args.load:
            load_file(file)
    args.process = process
    return command.run(args)


def overview() -> str:
    """What `irc --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: irc COMMAND ...",
            "",
            "A graph compiler for transformers and embedding models.",
            "",
            *lines,
            "",
            "irc COMMAND --help tells more, with examples. irc --version prints the version.",
        ]
    )


def _debug(error: Exception) -> None:
    """With IRC_DEBUG=1 the traceback is printed before the sentence."""
    if os.environ.get("IRC_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)


def _missing_package(error: Exception) -> str:
    """The package whose absence is the error, if it is one of others."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return "" if package == "irc" else package


def _sentence(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _drop_output() -> None:
    """Nothing more goes to a stdout that cannot take it, not even at exit."""
    if sys.stdout is not sys.__stdout__:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
