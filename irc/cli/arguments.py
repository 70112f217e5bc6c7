"""Argument parsing: argparse with irc's messages, kinds of values, and groups of options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from ..argument_checks import MOST_THREADS, whole_number_in
from ..errors import did_you_mean

if TYPE_CHECKING:
    from ..pipeline import Instrument
    from ..pipeline.instruments import Limit

Range = tuple[int, int, int]
TRACEBACK = "--traceback"


class Usage(Exception):
    """Wrong usage of a command; exit status 2."""

    def __init__(self, message: str, hint: str = "irc --help lists the commands") -> None:
        super().__init__(message)
        self.hint = hint


class Store(argparse.Action):
    """Stores the value of an option. A second value is combined with the first by `join`, or
    refused, so that no value is lost."""

    def __init__(
        self, *args: Any, join: Callable[[Any, Any], Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.join = join

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        if option_string is not None and self.dest in parser.given:
            if self.join is None:
                raise argparse.ArgumentError(self, "given twice; expected it once")
            try:
                values = self.join(getattr(namespace, self.dest), values)
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentError(self, str(error)) from None
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class Switch(argparse.BooleanOptionalAction):
    """`--name` or `--no-name`, not both."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        super().__call__(parser, namespace, values, option_string)
        if before not in (None, getattr(namespace, self.dest)):
            raise argparse.ArgumentError(self, "given in both forms; expected one")


class Parser(argparse.ArgumentParser):
    """The parser of one command; `given` are the options with values that it has seen.

    Where `takes_rest` is set, the words behind `--` are not parsed; they become `args.rest`.
    """

    takes_rest = False

    def __init__(self, command: str, summary: str, examples: str) -> None:
        super().__init__(
            prog=f"irc {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{examples.strip(chr(10))}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.command, self.given = command, set[str]()
        for name in (None, "store"):
            self.register("action", name, Store)

    def error(self, message: str) -> NoReturn:
        """Raise Usage, where argparse would exit."""
        raise Usage(message, f"irc {self.command} --help lists the options")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; Usage names the nearest option where one is unknown."""
        known, rest = self.options(), list[str]()
        if self.takes_rest and "--" in words:
            at = list(words).index("--")
            words, rest = words[:at], list(words[at + 1 :])
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in known:
                near = did_you_mean(name, known)
                self.error(f"irc {self.command} has no option {name}{near}")
        args, extra = self.parse_known_args(words)
        args.given, args.rest = self.given, rest
        if extra:
            is_option = extra[0].startswith("-")
            what = f"irc {self.command} has no option" if is_option else "one argument too many:"
            self.error(f"{what} {extra[0]!r}")
        return args

    def options(self) -> list[str]:
        """All options of the command, such as `--dims` and `-o`."""
        return [name for action in self._actions for name in action.option_strings]


def word_of(*known: str) -> Callable[[str], str]:
    """The type of an option whose value is one of `known`."""

    def convert(text: str) -> str:
        if text not in known:
            hint = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}{hint}")
        return text

    return convert


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """The type of an option whose value is an integer from `least` to `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is more than {most}")
        return value

    return convert


def real_number(text: str) -> float:
    """The type of an option whose value is a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def with_comma(first: str, second: str) -> str:
    """One list of two lists of words."""
    return f"{first},{second}"


def disjoint(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """All entries; the keys must differ."""
    for name in first.keys() & second.keys():
        raise argparse.ArgumentTypeError(f"{name} is given twice")
    return first | second


def settings(text: str) -> dict[str, str]:
    """`key=value` as an entry."""
    return dict([setting(text)])


def setting(text: str) -> tuple[str, str]:
    """`key=value` as a pair of texts."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    return key.strip(), value


def ranges(text: str) -> dict[str, Range]:
    """`B=1:4:16,S=128` as {"B": (1, 4, 16), "S": (128, 128, 128)}."""
    found: dict[str, Range] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, value = setting(item)
        numbers = [whole_number_in(part.strip()) for part in value.split(":")]
        low, typical, high = numbers if len(numbers) == 3 else (numbers * 3)[:3]
        if len(numbers) not in (1, 3) or low is None or typical is None or high is None:
            raise argparse.ArgumentTypeError(f"{item!r} is not name=min:typical:max")
        found = disjoint(found, {name: (low, typical, high)})
    return found


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, for programs that read the output."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_script(parser: argparse.ArgumentParser) -> None:
    """The options of a script, from which a module is traced."""
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="the checkpoint folder of a script or module")
    add("--dtype", type=word_of("f32", "f16", "bf16"), help="compute in f32, f16 or bf16")
    what = "an argument of the script's factory; may be repeated"
    kind: dict[str, Any] = {"dest": "settings", "type": settings, "join": disjoint, "default": {}}
    add("--set", metavar="KEY=VALUE", help=what, **kind)


def script_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_script` that have values."""
    found = {"checkpoint": args.checkpoint, "dtype": args.dtype, "settings": args.settings}
    return {name: value for name, value in found.items() if value}


def add_compilation(parser: argparse.ArgumentParser, backend: str) -> None:
    """The options that `compile` and `forecast` share; `backend` is the help of `--backend`."""
    add_script(parser)
    add = parser.add_argument
    what = "min:typical:max of symbolic dimensions, or one number"
    add("--dims", metavar="B=1:4:16,...", type=ranges, join=disjoint, default={}, help=what)
    add("--backend", metavar="NAME", help=backend)
    what = "the passes, in place of the backend's own"
    add("--pipeline", metavar="TEXT", join=with_comma, help=what)
    what = "ranks by axes (pp, dp, cp, ep, tp): tp=2,pp=2"
    add("--mesh", metavar="AXES", default="", join=with_comma, help=what)
    what = "how weights are sharded: rows such as *.fc.weight 0@tp, or a tp_plan in JSON"
    add("--plan", metavar="FILE", default="", help=what)
    add("--sequence", action="store_true", help="shard activations over tokens between blocks")
    add("--embedding", metavar="SCHEME", default="", help="sharding of embeddings: auto, RA, ...")
    what = "out-of-range ids of embeddings: zero, clamp, row:k, error"
    add("--outside", metavar="POLICY", default="", help=what)
    add("--next-tokens", action="store_true", help="return the likeliest tokens, not logits")
    add_quantization(parser)


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """How weights, inputs of layers and caches are quantized."""
    add = parser.add_argument_group("quantization").add_argument
    what = "w8a16, w4a16, fp8, ... (irc passes quantize has all), auto, or a JSON table of scopes"
    add("--quantize", metavar="SCHEME", default="", help=what)
    what = "inputs of a weight that share a scale (default: as the scheme says)"
    add("--group", metavar="N", type=whole_number(), default=0, help=what)
    what = "a glob of layers to quantize; may be repeated (default: all)"
    add("--include", metavar="GLOB", action="append", help=what)
    what = "a glob of layers to keep; may be repeated (default: routers; '' is none)"
    add("--exclude", metavar="GLOB", action="append", help=what)
    add("--kv-cache", metavar="KIND", default="", help="keep KV caches in int8 or fp8")
    what = "statistics of irc calibrate, or the data for them: .txt, .npz or a folder of such"
    add("--calibration", metavar="PATH", default="", help=what)
    what = (
        "range of a static scale: min-max (FP8's default), mse (INT8's), percentile[:99.9], entropy"
    )
    add("--observer", metavar="NAME", default="", help=what)
    add("--budget", metavar="TEXT", default="", help='for auto: "4.5 bits" per weight, or "30 dB"')


def quantization_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_quantization` that have values."""
    texts = ("quantize", "kv_cache", "calibration", "observer", "budget")
    found = {name: getattr(args, name) for name in (*texts, "group", "include", "exclude")}
    if found["exclude"] is not None:
        found["exclude"] = [glob for glob in found["exclude"] if glob]
    return {name: value for name, value in found.items() if value not in ("", 0, None)}


def compilation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_compilation` but those of `parallel_options`."""
    found = {"dims": args.dims, "backend": args.backend, "pipeline": args.pipeline}
    given = {k: v for k, v in found.items() if v not in (None, {})}
    return script_options(args) | given | quantization_options(args)


def parallel_options(args: argparse.Namespace) -> dict[str, Any]:
    """How a module is spread over ranks; the fields of `Parallel`."""
    names = ("mesh", "plan", "sequence", "embedding", "outside", "next_tokens")
    return {name: getattr(args, name) for name in names}


def add_passes(parser: argparse.ArgumentParser) -> None:
    """What is done after every pass."""
    add = parser.add_argument
    what = "write the module after every pass into the folder D, in place of earlier dumps"
    add("--dump-dir", metavar="D", help=what)
    add("--no-verify", action="store_true", help="do not verify the module after every pass")


def pass_instruments(
    args: argparse.Namespace,
    files: Sequence[str],
    options: Sequence[str] = (),
    limit: Limit | None = None,
    base: str = "",
) -> list[Instrument]:
    """The instruments of `add_passes`.

    The rest is for the commands that they write: `files` may declare operations of a dumped module,
    `options` are further options of `irc opt`, and weight files are relative to `base`.
    """
    from ..pipeline.instruments import DumpDir, Replay, Reproducer, VerifyEach

    words = [word for file in files for word in ("--load", os.path.abspath(file))]
    words += ["--no-verify"] if args.no_verify else []
    replay = Replay([*words, *options], limit, base)
    found: list[Instrument] = [Reproducer(args.dump_dir, replay)]
    found += [] if args.no_verify else [VerifyEach()]
    return found + ([] if args.dump_dir is None else [DumpDir(args.dump_dir, replay)])


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """How a program is loaded."""
    add = parser.add_argument
    add("--backend", metavar="NAME", help="reference: run module.irc in numpy")
    what = "threads of one operation (default: the physical cores)"
    add("--threads", metavar="N", type=whole_number(1, MOST_THREADS), help=what)
    what = "read weights from their files: loads at once, runs about a fifth slower"
    add("--low-memory", action="store_true", help=what)
    add("--no-self-test", action="store_true", help="do not test engines when they are loaded")
    add_plugin(add)


def runtime_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load` that have values."""
    options: dict[str, Any] = {"threads": args.threads} if args.threads else {}
    options |= {"low_memory": True} if args.low_memory else {}
    options |= {"plugins": tuple(args.plugin)} if args.plugin else {}
    return options | ({"self_test": False} if args.no_self_test else {})


def add_tensorrt_llm(parser: argparse.ArgumentParser) -> None:
    """`--tensorrt-llm VERSION` and `--tensorrt-llm-sources DIR`, for scripts of TensorRT-LLM."""
    add = parser.add_argument
    what = (
        "the version of TensorRT-LLM that a script is written for, such as 0.7 (default: as read)"
    )
    add("--tensorrt-llm", metavar="VERSION", help=what)
    what = "your copy of TensorRT-LLM's sources, for the models that irc does not have"
    add("--tensorrt-llm-sources", metavar="DIR", help=what)


def add_plugin(add: Callable[..., argparse.Action]) -> None:
    """`--plugin F`; `add` adds an argument to a parser or group."""
    what = "a Python file that registers plugins of engines; may be repeated"
    add("--plugin", metavar="F", action="append", default=[], help=what)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every command has; main.py loads the files and prints the tracebacks."""
    add = parser.add_argument
    what = "a Python file that registers passes, operations or plugins; may be repeated"
    add("--load", metavar="F", action="append", default=[], help=what)
    add(TRACEBACK, action="store_true", help="show Python's traceback of an error")
