"""Argument parsing: argparse with our messages, and the kinds of values that options take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean


class Usage(Exception):
    """The command was called in a way that it does not understand; exit status 2."""

    def __init__(self, message: str, hint: str = "irc --help lists the commands") -> None:
        super().__init__(message)
        self.hint = hint


class Parser(argparse.ArgumentParser):
    """The parser of one command."""

    def __init__(self, command: str, summary: str, examples: str) -> None:
        super().__init__(
            prog=f"irc {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{examples.strip(chr(10))}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.command = command

    def error(self, message: str) -> NoReturn:
        """Raise Usage, where argparse would exit."""
        raise Usage(message, f"irc {self.command} --help tells more")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; Usage names the nearest option where one is unknown."""
        args, extra = self.parse_known_args(words)
        if extra:
            self.error(self._unknown(extra[0]))
        return args

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"one argument too many: {word!r}"
        known = [name for action in self._actions for name in action.option_strings]
        name = word.partition("=")[0]
        return f"irc {self.command} has no option {name}{did_you_mean(name, known)}"


def word_of(*known: str) -> Callable[[str], str]:
    """An option's value that is one of `known`."""

    def convert(text: str) -> str:
        if text not in known:
            hint = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}{hint}")
        return text

    return convert


def whole_number(least: int = 0) -> Callable[[str], int]:
    """An option's value that is an integer of at least `least`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return convert


def setting(text: str) -> tuple[str, str]:
    """`key=value` as a pair of texts."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    return key.strip(), value


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, for programs that read the output."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_setting(add: Callable[..., argparse.Action]) -> None:
    """`--set KEY=VALUE`, for scripts; `add` adds an argument to a parser or group."""
    add(
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        type=setting,
        action="append",
        default=[],
        help="an argument of the script's factory; may be repeated",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """What a script may need before there is a module."""
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="the folder with the sizes and weights of a script")
    add(
        "--dtype",
        type=word_of("f32", "f16", "bf16"),
        help="what a script computes in: f32, f16 or bf16",
    )
    add_setting(add)


def script_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a script that were given."""
    given = {"checkpoint": args.checkpoint, "dtype": args.dtype, "settings": dict(args.settings)}
    return {name: value for name, value in given.items() if value}


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """What decides how a module is spread over ranks."""
    add = parser.add_argument
    add("--mesh", metavar="AXES", default="", help="ranks by axes (pp, dp, cp, ep, tp): tp=2,pp=2")
    add(
        "--plan",
        metavar="FILE",
        default="",
        help="which weights are split how: rows such as *.fc.weight 0@tp, or a tp_plan in JSON",
    )
    add("--sequence", action="store_true", help="split activations over tokens between blocks")
    add("--embedding", metavar="SCHEME", default="", help="of embeddings: auto, RA, CS, ...")
    add("--outside", metavar="POLICY", default="", help="ids in no row: zero, clamp, row:k, error")
    add("--next-tokens", action="store_true", help="give the likeliest tokens in place of logits")


def parallel_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `prepare` that these arguments are."""
    names = ("mesh", "plan", "sequence", "embedding", "outside", "next_tokens")
    return {name: getattr(args, name) for name in names}


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """What decides how a program is loaded."""
    parser.add_argument("--backend", metavar="NAME", help="run module.irc with it: reference")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=whole_number(1),
        help="threads of one operation (the physical cores)",
    )
    parser.add_argument(
        "--low-memory",
        action="store_true",
        help="use weights where they lie in their files: loads at once, runs about a fifth slower",
    )
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="serve engines that were not tested when loaded",
    )
    add_plugin(parser.add_argument)


def add_plugin(add: Callable[..., argparse.Action]) -> None:
    """`--plugin F`, for plugins of the user's own; `add` adds an argument to a parser or group."""
    add(
        "--plugin",
        metavar="F",
        action="append",
        default=[],
        help="a Python file that registers plugins of engines; may be repeated",
    )


def runtime_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load` that were given."""
    options: dict[str, Any] = {"threads": args.threads} if args.threads else {}
    options |= {"low_memory": True} if args.low_memory else {}
    options |= {"plugins": tuple(args.plugin)} if args.plugin else {}
    return options | ({"self_test": False} if args.no_self_test else {})


def add_load(parser: argparse.ArgumentParser) -> None:
    """`--load F`, for passes, operations and plugins of the user's own; main.py loads them."""
    parser.add_argument(
        "--load",
        metavar="F",
        action="append",
        default=[],
        help="a Python file that registers passes, operations or plugins; may be repeated",
    )


Namespace = argparse.Namespace
Action: Any = argparse.Action
