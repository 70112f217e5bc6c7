"""Argument parsing: argparse with irc's messages, and flags from the options that are declared."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..argument_checks import with_comma as with_comma
from ..errors import Error, did_you_mean

if TYPE_CHECKING:
    from ..pipeline import Instrument
    from ..pipeline.instruments import Limit
    from ..pipeline.options import Setting

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
            except Error as error:
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

    `words` are those of the command, where they are known when it is configured. Where `takes_rest`
    is set, the words behind `--` are not parsed; they become `args.rest`.
    """

    takes_rest = False

    def __init__(
        self, command: str, summary: str, examples: str, words: Sequence[str] = ()
    ) -> None:
        super().__init__(
            prog=f"irc {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{examples.strip(chr(10))}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.command, self.given, self.words = command, set[str](), words
        for name in (None, "store"):
            self.register("action", name, Store)

    def error(self, message: str) -> NoReturn:
        """Raise Usage, where argparse would exit."""
        raise Usage(message, f"irc {self.command} --help lists the options")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; Usage names the nearest option where one is unknown."""
        options, rest = self.options(), list[str]()
        if self.takes_rest and "--" in words:
            at = list(words).index("--")
            words, rest = words[:at], list(words[at + 1 :])
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in options:
                near = did_you_mean(name, options)
                self.error(f"irc {self.command} has no option {name}{near}")
        args, extra = self.parse_known_args(words)
        args.given, args.rest = self.given, rest
        if extra:
            is_option = extra[0].startswith("-")
            what = f"irc {self.command} has no option" if is_option else "one argument too many:"
            self.error(f"{what} {extra[0]!r}")
        return args

    def values_of(self, flag: str) -> list[str]:
        """The values of an option in the words, before they are parsed."""
        words = [*takewhile(lambda word: word != "--", self.words)]
        behind = [value for word, value in pairwise(words) if word == flag]
        return behind + [w.partition("=")[2] for w in words if w.startswith(f"{flag}=")]

    def options(self) -> list[str]:
        """All options of the command, such as `--dims` and `-o`."""
        return [name for action in self._actions for name in action.option_strings]


def word_of(*words: str) -> Callable[[str], str]:
    """The type of an option whose value is one of `known`."""

    def convert(text: str) -> str:
        if text not in words:
            hint = did_you_mean(text, words)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}{hint}")
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


def reads(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of an option whose value `parse` reads, which raises Errors."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_settings(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage]
    settings: Iterable[Setting],
) -> None:
    """A flag per declared option; those that are not given are None."""
    for setting in settings:
        how = setting.option
        words: dict[str, Any] = {"dest": setting.keyword, "help": how.help}
        if how.both_forms:
            words["action"] = Switch
        elif setting.type is bool and how.parse is None:
            words |= {"action": "store_const", "const": not setting.default}
        else:
            words |= {"type": _type_of(setting), "metavar": how.metavar}
            words |= {"action": "append"} if setting.is_list else {"join": how.join}
        parser.add_argument(setting.flag, **words)


def _type_of(setting: Setting) -> Callable[[str], Any]:
    how = setting.option
    if how.parse is not None:
        return reads(how.parse)
    if how.choices:
        return word_of(*filter(None, how.choices))
    if setting.type is float:
        return _number(setting)
    most = None if how.most is None else int(how.most)
    return whole_number(int(how.least or 0), most) if setting.type is int else str


def _number(setting: Setting) -> Callable[[str], float]:
    """The type of an option whose value is a finite number in its range."""

    def parse(text: str) -> float:
        try:
            return setting.checked(float(text))
        except ValueError:
            raise Error(f"{text!r} is not a number") from None

    return reads(parse)


def given_settings(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options of these keywords that are on the command line; lists without empty texts."""
    chosen: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    for name, values in chosen.items():
        if type(values) is list:
            chosen[name] = [value for value in cast("list[Any]", values) if value]
    return {name: value for name, value in chosen.items() if value is not None}


SCRIPT = ("checkpoint", "dtype", "settings")  # the options of a script that is only traced


def add_source(parser: argparse.ArgumentParser, *names: str) -> None:
    """The options of these names of a source."""
    from ..driver.sources import SourceOptions
    from ..pipeline.options import settings_of

    declared = settings_of(SourceOptions)
    add_settings(parser, [declared[name] for name in names])


def add_dims(parser: argparse.ArgumentParser, what: str) -> None:
    """`--dims B=1,S=1`; `what` is its help."""
    from ..driver.sources import disjoint, ranges

    kind: dict[str, Any] = {"type": reads(ranges), "join": disjoint, "default": {}}
    parser.add_argument("--dims", metavar="B=1,S=1,...", help=what, **kind)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, for programs that read the output."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_compilation(parser: Parser, *names: str, backends: bool = False) -> list[str]:
    """The general options of a compilation (of these names), those of passes, and with `backends`
    those of backends; all their keywords."""
    from ..backends import OWN
    from ..driver.options import CompileOptions, backend_settings, pass_settings
    from ..pipeline.options import settings_of

    general, of_passes = settings_of(CompileOptions), pass_settings()
    names = names or (*general,)
    add_settings(parser, [general[name] for name in names])
    groups: dict[str, list[Setting]] = {}
    for setting in of_passes.values():
        groups.setdefault(f"the pass {setting.owner.name}", []).append(setting)
    named = {*parser.values_of("--backend")} if backends else ()
    of_backends = backend_settings(*OWN, *named) if backends else {}
    for setting, users in of_backends.values():
        groups.setdefault(f"--backend {' or '.join(users)}", []).append(setting)
    for title, members in groups.items():
        add_settings(parser.add_argument_group(title), members)
    return [*names, *of_passes, *of_backends]


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
    instruments: list[Instrument] = [Reproducer(args.dump_dir, replay)]
    instruments += [] if args.no_verify else [VerifyEach()]
    return instruments + ([] if args.dump_dir is None else [DumpDir(args.dump_dir, replay)])


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """How a program is loaded."""
    parser.add_argument("--backend", metavar="NAME", help="reference: run module.irc in numpy")
    add_settings(parser, [setting for setting, _ in load_settings().values()])


def load_settings() -> Mapping[str, tuple[Setting, list[str]]]:
    """The options with which backends load programs, with the names of those backends."""
    from ..backends import OWN
    from ..driver.options import backend_settings

    return backend_settings(*OWN, which="load_options")


def runtime_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load` that have values."""
    return given_settings(args, load_settings())


def add_tensorrt_llm(parser: argparse.ArgumentParser) -> None:
    """`--tensorrt-llm VERSION` and `--tensorrt-llm-sources DIR`, for scripts of TensorRT-LLM."""
    add = parser.add_argument
    what = (
        "the version of TensorRT-LLM that a script is written for, such as 0.7 (default: as read)"
    )
    add("--tensorrt-llm", metavar="VERSION", help=what)
    what = "your copy of TensorRT-LLM's sources, for the models that irc does not have"
    add("--tensorrt-llm-sources", metavar="DIR", help=what)


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """`--plugin F`."""
    what = "a Python file that registers plugins of engines; may be repeated"
    add = parser.add_argument
    add("--plugin", metavar="F", dest="plugins", action="append", default=[], help=what)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every command has; main.py loads the files and prints the tracebacks."""
    add = parser.add_argument
    what = "a Python file that registers passes, operations or plugins; may be repeated"
    add("--load", metavar="F", action="append", default=[], help=what)
    add(TRACEBACK, action="store_true", help="show Python's traceback of an error")
