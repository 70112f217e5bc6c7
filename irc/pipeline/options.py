"""Options: fields of a pass, a backend or a command, from which texts, keywords and flags derive.

A field of a pass is an option in the text of pipelines. `option(...)` as its default makes it an
option of `irc.compile` and of the command line too: the checks of its values, the messages about
it and its flag derive from that one declaration.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from ..argument_checks import check_count, check_kind, check_number, check_path
from ..errors import Error, did_you_mean
from ..ir.attributes import split_optional
from ..text.printer import literal

PATHS = (str, os.PathLike)
OptionsClass = typing.TypeVar("OptionsClass")

# scalar -> (one in words, the items of a list of it)
_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true, false"),
    int: ("an integer", "1, 2"),
    float: ("a number", "0.5, 1"),
    str: ("a string", '"a", "b"'),
}


class Kind(typing.NamedTuple):
    """The type of an option: a scalar or a list of one, and whether `none` is allowed."""

    scalar: type
    sequence: type | None
    optional: bool

    def __str__(self) -> str:
        one, items = _SCALARS[self.scalar]
        text = one if self.sequence is None else f"a list such as [{items}]"
        return f"{text} or none" if self.optional else text


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation; an Error if it is no type of an option."""
    annotation, optional = split_optional(annotation)
    sequence = typing.get_origin(annotation)
    if sequence in (list, tuple):
        args = typing.get_args(annotation)
        if args[0] in _SCALARS and (sequence is list or args[1:] == (...,)):
            return Kind(args[0], sequence, optional)
    elif annotation in _SCALARS:
        return Kind(annotation, None, optional)
    raise Error(
        f"an option is bool, int, float, str, a list or tuple[..., ...] of one of them, or any of "
        f"these | None, not {annotation}"
    )


def convert(value: Any, kind: Kind) -> Any:
    """A literal as an option of this kind; an Error names the expected kind."""
    if value is None and kind.optional:
        return None
    if kind.sequence is not None:
        if isinstance(value, (list, tuple)):
            items = typing.cast("list[Any]", value)
            return kind.sequence(_scalar(item, kind.scalar, kind) for item in items)
    else:
        return _scalar(value, kind.scalar, kind)
    raise _wrong(value, kind)


def _scalar(value: Any, wanted: type, kind: Kind) -> Any:
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    raise _wrong(value, kind)


def _wrong(value: Any, kind: Kind) -> Error:
    return Error(f"{literal(value)} is not {kind}")


@dataclass(frozen=True)
class Option:
    """How a person sets a field, in Python and on the command line.

    `keyword`: its name in `irc.compile`, by default that of the field; `flag`: by default the
    keyword with dashes. `takes`: the types of its values, by default that of the annotation;
    `expects`: what a value is, in messages. `choices` (by default those of a Literal), `least` and
    `most` bound it. `parse` reads
    the text of the command line, where another value than that text is meant; `join` combines two
    values. A bool with `both_forms` has --name and --no-name. `one_rank`: why it has no effect
    without several ranks.
    """

    help: str
    keyword: str = ""
    flag: str = ""
    metavar: str | None = None
    takes: tuple[type, ...] = ()
    expects: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    parse: Callable[[str], Any] | None = None
    join: Callable[[Any, Any], Any] | None = None
    both_forms: bool = False
    one_rank: str = ""


def option(default: Any, help: str, **how: Any) -> Any:
    """The default of a field that a person can set; `how` are fields of Option."""
    return field(default=default, metadata={"option": Option(help, **how)})


def target_option() -> Any:
    """The option `target`, which several backends have."""
    what = "cuda/sm_90, or library[-version][/sm_...], as in tensorrt-rtx-1.7/sm_89"
    return option("", what, metavar="NAME")


@dataclass(frozen=True)
class Setting:
    """An option with the class that declares it; `type` is that of its values, None for any."""

    owner: type[Any]
    field: str
    type: Any
    default: Any
    option: Option

    @property
    def keyword(self) -> str:
        """Its name in `irc.compile`."""
        return self.option.keyword or self.field

    @property
    def flag(self) -> str:
        """Its name on the command line; `--no-...` where it switches something off."""
        word = self.keyword.replace("_", "-")
        return self.option.flag or (f"--no-{word}" if self.default is True else f"--{word}")

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return typing.get_origin(self.type) in (list, tuple)

    @property
    def in_pipeline(self) -> str:
        """How the text of a pipeline says it, where it is the option of a pass."""
        if not self.field:
            return self.owner.name
        value = "true" if self.type is bool else "..."
        return f"{self.owner.name}{{{self.field.replace('_', '-')}={value}}}"

    def checked(self, value: Any) -> Any:
        """A value as the field takes it; an Error where it has another type or is out of range."""
        name, how = self.keyword, self.option
        if value is None:
            return self.default
        if self.is_list and isinstance(value, how.takes or ()):
            value = (value,)  # a single one
        self._check_type(value)
        if how.choices and value not in how.choices:
            raise Error(f"{name} is {value!r}; it can be {' or '.join(how.choices)}")
        if self.type is float:
            check_number(name, value, how.least, how.most)
        elif how.least is not None:
            check_count(name, value, int(how.least), inf if how.most is None else how.most)
        if self.is_list:
            sequence: Any = typing.get_origin(self.type)
            return sequence(value)
        return Path(value) if self.type is Path else value

    def _check_type(self, value: Any) -> None:
        name, takes = self.keyword, self.option.takes
        if self.is_list:
            item = takes or (typing.get_args(self.type)[0],)
            expects = self.option.expects or "a list of texts"
            check_kind(name, value, (list, tuple), expects)
            for entry in value:
                check_kind(f"an entry of {name}", entry, item, expects)
            return
        numbers = (int, float) if self.type is float else (self.type,)
        takes = takes or (numbers if self.type in _SCALARS else (object,))
        takes = PATHS if self.type is Path else takes
        if takes == PATHS:
            check_path(name, value)
        elif self.type is not bool and isinstance(value, bool) and object not in takes:
            check_kind(name, value, (), self._expects)  # a bool is an int to Python
        else:
            check_kind(name, value, takes, self._expects)

    @property
    def _expects(self) -> str:
        words = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
        return self.option.expects or words.get(self.type, "another value")


def settings_of(*owners: type[Any]) -> dict[str, Setting]:
    """The options that people can set of some classes, by keyword; no two have the same."""
    settings: dict[str, Setting] = {}
    for owner in owners:
        for setting in _declared(owner):
            if setting.keyword in settings:
                other = settings[setting.keyword].owner.__name__
                raise Error(
                    f"{other} and {owner.__name__} both declare the option {setting.keyword}"
                )
            settings[setting.keyword] = setting
    return settings


def _declared(owner: type[Any]) -> Iterable[Setting]:
    hints = typing.get_type_hints(owner)
    if (flag := getattr(owner, "flag", None)) is not None:
        yield Setting(owner, "", bool, False, flag)
    for declared in fields(owner):
        if "option" in declared.metadata:
            type, _ = split_optional(hints[declared.name])
            how: Option = declared.metadata["option"]
            if typing.get_origin(type) is typing.Literal:
                type, how = str, replace(how, choices=typing.get_args(type))
            yield Setting(owner, declared.name, type, default_of(declared), how)


def options_of(
    owner: type[OptionsClass], given: Mapping[str, Any], what: str = "irc.compile"
) -> OptionsClass:
    """An instance with the options that are given, None for the default; an Error about others."""
    settings = settings_of(owner)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in settings:
            raise Error(f"{what} has no option {name}{did_you_mean(str(name), settings)}")
        if value is not None:
            values[settings[name].field] = settings[name].checked(value)
    return owner(**values)


def default_of(field: Field[Any]) -> Any:
    """The default of an option, or `dataclasses.MISSING` if it is required."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
