"""Entry point of the command line: runs a command, and prints errors as sentences."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from .. import __version__
from ..errors import Error, did_you_mean, printable
from .arguments import TRACEBACK, Parser, Usage, add_common
from .console import error_line, warn
from .ranks import Process

# Every command is a module with EXAMPLES, configure(parser) and run(args): that of its name here.
GROUPS = {
    "compile and run": {
        "compile": "write an artifact folder from a script, a checkpoint folder or a module",
        "build": "compile a checkpoint folder with the flags of trtllm-build",
        "run": "run an artifact on given or random arrays, and compare the results",
        "generate": "continue a prompt with a compiled language model",
        "embed": "compute vectors of texts with a compiled encoder",
        "serve": "answer requests over HTTP by a compiled model, as OpenAI's API",
        "bench": "time an artifact, or the collectives of this machine",
    },
    "quantize": {
        "calibrate": "gather statistics of activations for quantization: runs a model on data",
        "quality": "measure the perplexity of a language model, and its difference from another",
    },
    "read and edit modules": {
        "opt": "run passes over a module: text in, text out",
        "new-pass": "write a pass with comments, and its test",
        "show": "print the module of a file or an artifact, or one scope of it",
        "diff": "compare two modules",
        "compare": "compare the activations of two models, and name the first layer that differs",
        "prove": "check that a module, or every pass of an artifact, keeps what is computed",
    },
    "find what is wrong": {
        "bisect": "find the rewrite of a pass, or the kernel, that breaks a module",
        "reduce": "shrink a module while a command still fails",
        "why": "trace a value of an artifact back through the passes to the script",
    },
    "check before a build": {
        "lint": "check ONNX models for TensorRT, and scripts of TensorRT-LLM for irc",
        "forecast": "estimate memory, traffic and times per rank; nothing is built",
        "doctor": "check the installation and the files of an artifact",
    },
    "what there is": {
        "models": "list the families of models, and what of them is checked",
        "ops": "list the operations and the backends that have them",
        "passes": "list the passes and their options",
        "plugins": "list the plugins of engines, or describe one",
        "cache": "list or delete the engines and kernels that are kept for later",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_ELSEWHERE = {"build": "irc.frontends.tensorrt_llm.trtllm_build", "new-pass": ".new_pass"}
_HELP = ("-h", "--help", "help")
_INTERNAL = 70
INTERRUPTED, TERMINATED = 130, 143
# what numpy raises as ValueErrors for arrays beyond its own limits
_TOO_BIG = re.compile(r"(array is too big|Maximum allowed (dimension|size) exceeded)")


def main(argv: list[str] | None = None) -> int:
    """Run one command. 0: done, 1: the input has to change, 2: wrong usage."""
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
        with signals.handled(), warnings.catch_warnings():
            warnings.showwarning = _show
            status = _dispatch(process.argv, process)
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        # Code inside an extension module may turn a signal into an error of its own.
        status = signals.status or _answer_to(error, process.argv)
    status = signals.status or status
    if status == INTERRUPTED:
        warn("\ninterrupted")
    return status


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the place in irc that gave it."""
    warn(f"note: {printable(str(message))}")


def _answer_to(error: Exception, words: list[str]) -> int:
    """Print an error; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 0
    if isinstance(error, Usage):
        warn(error_line(str(error)))
        warn(printable(error.hint))
        return 2
    if TRACEBACK in words:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, Error):
        warn(error_line(str(error)))
        for line in _options_elsewhere(str(error), words[0]):
            warn(line)
        return 1
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        warn(error_line(f"{error.filename}: {reason}" if error.filename else reason))
        _drop_output()
        return 1
    if isinstance(error, MemoryError) or _TOO_BIG.match(str(error)):
        what = "this takes more memory than there is"
        advice = "give smaller sizes (--dims, inputs), or use a machine with more"
        warn(error_line(f"{what}{f' ({error})' if str(error) else ''}; {advice}"))
        return 1
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "irc").partition(".")[0]
    if package != "irc":
        warn(error_line(f"the package {package} is not installed: pip install {package}"))
        return 1
    from .crash import crash_report

    warn(error_line(crash_report(error, words)))
    return _INTERNAL


def _options_elsewhere(message: str, command: str) -> list[str]:
    """A line per option that an error advises and the command lacks: the commands that have it."""
    advised = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]+", message))
    options_of = {name: _configured(name)[1].options() for name in COMMANDS if advised}
    lines: list[str] = []
    for option in advised:
        others = [name for name, options in options_of.items() if option in options]
        if command not in others and not any(name in message for name in others):
            lines += [f"{option} is an option of irc {', irc '.join(others)}"] if others else []
    return lines


def _configured(name: str, words: Sequence[str] = ()) -> tuple[Any, Parser]:
    """The module of a command, and its parser."""
    command: Any = import_module(_ELSEWHERE.get(name, f".{name}"), __package__)
    parser = Parser(name, COMMANDS[name], command.EXAMPLES, words)
    if files := parser.values_of("--load"):  # which may declare options
        from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (takes names)
        from ..pipeline import load_file

        for file in files:
            load_file(file)
    command.configure(parser)
    add_common(parser)
    return command, parser


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
    command, parser = _configured(name, rest)
    try:
        args = parser.parse(rest)
    except SystemExit as asked:  # argparse has printed the help
        return int(asked.code or 0)
    args.process = process
    return command.run(args)


def overview() -> str:
    """What `irc --help` prints."""
    width = max(map(len, COMMANDS))
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:{width}}  {summary}" for name, summary in group.items()]
    about = "A graph compiler for transformers and embedding models."
    more = (
        "irc compile --backend: onnx for CPUs; cuda, tensorrt-rtx or tensorrt for NVIDIA GPUs; "
        "reference for numpy.\nirc COMMAND --help lists options and examples. "
        "irc --version prints the version."
    )
    return "\n".join(["usage: irc COMMAND ...", "", about, *lines, "", more])


class Signals:
    """The signal that arrived. `status` is the exit status that it requires, 0 if none came.

    Python code that starts up inside an extension module may swallow the exception raised here, or
    turn it into one of its own; the status tells even then.
    """

    def __init__(self) -> None:
        self.status = 0

    @contextmanager
    def handled(self) -> Generator[None]:
        """SIGINT raises KeyboardInterrupt and SIGTERM SystemExit inside."""
        try:
            before = {
                signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
            }
        except ValueError:  # not the main thread, which alone may do this
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self.status = INTERRUPTED
        raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        self.status = TERMINATED
        raise SystemExit(TERMINATED)


def _drop_output() -> None:
    """Send further output to the null device, since stdout cannot be written."""
    if sys.stdout is not sys.__stdout__:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
