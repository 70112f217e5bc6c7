"""The binder: binds calls of a script by `api.toml`, the table of TensorRT-LLM's names by release.

`@api("functional.embedding")` declares that a function or class of irc has a row of the table, and
binds its calls: positional arguments by the order of the script's release, keywords by the names
that any release has. An argument that the implementation lacks has no effect, or is refused, for
the reason that the table states.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property, partial, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from ...errors import did_you_mean
from .context import current_session, minor
from .errors import ScriptError

Kind = Literal["supported", "without effect", "refused", "unknown"]
Bound = TypeVar("Bound", bound=Callable[..., Any])
Declared = TypeVar("Declared")
ROOT = "tensorrt_llm"
RELEASES = {5: "0.5.0", 6: "0.6.1", 7: "0.7.1", **{n: f"0.{n}.0" for n in range(8, 17)}}
_COMPILE = "irc compile FOLDER"
_EMPTY = inspect.Parameter.empty
_CONTAINERS: tuple[Any, ...] = (str, list, tuple, dict, set)


# -- the table


@dataclass(frozen=True)
class Argument:
    """One argument of a row, in the releases 0.N that have it; `default` is its text or None."""

    name: str
    default: str | None
    releases: frozenset[int]

    @cached_property
    def value(self) -> Any:
        """The default, if it is a literal; else _EMPTY."""
        try:
            return _EMPTY if self.default is None else ast.literal_eval(self.default)
        except ValueError:
            return _EMPTY


@dataclass(frozen=True)
class Row:
    """One public name: its path below `tensorrt_llm`, releases, and arguments of all releases.

    `*` among the arguments begins those that are given by keyword only, `**` stands for keywords
    of the script's own. `attributes` and `members` are those of a class.
    """

    path: str
    releases: frozenset[int]
    arguments: tuple[Argument, ...] = ()
    attributes: tuple[Argument, ...] = ()
    members: tuple[Argument, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the arguments in any release."""
        return frozenset(arg.name for arg in self.arguments if arg.name != "*")

    @property
    def takes_any(self) -> bool:
        """Whether a call may have keywords of the script's own (`**`)."""
        return "**" in self.names

    def of(self, release: int) -> tuple[list[Argument], list[Argument]]:
        """The arguments that release 0.N takes (by position or keyword, by keyword only).

        Of a name that the release lacks they are those of the nearest that has it.
        """
        release = min(self.releases, key=lambda number: (abs(number - release), number))
        arguments = [arg for arg in self.arguments if release in arg.releases and arg.name != "**"]
        star = next((i for i, arg in enumerate(arguments) if arg.name == "*"), len(arguments))
        return arguments[:star], arguments[star + 1 :]


@dataclass(frozen=True)
class Status:
    """What a name or an argument is in irc, and why."""

    kind: Kind
    why: str = ""


SUPPORTED = Status("supported")
_ALL = frozenset(RELEASES)


@cache
def _file() -> dict[str, Any]:
    with (Path(__file__).parent / "api.toml").open("rb") as file:
        return tomllib.load(file)


def _releases(text: str, whole: frozenset[int]) -> frozenset[int]:
    """The releases of `0.6-0.9|0.12-`, in which a missing end is that of `whole`."""
    if not text:
        return whole
    numbers: set[int] = set()
    for part in text.split("|"):
        low, dash, high = part.partition("-")
        first = minor(low) if low else min(whole)
        last = minor(high) if high else max(whole) if dash else first
        numbers |= {n for n in whole if first <= n <= last}
    return frozenset(numbers)


def _arguments(text: str, whole: frozenset[int]) -> tuple[Argument, ...]:
    """The arguments of `name=default @releases, ...`."""
    arguments: list[Argument] = []
    for part in re.split(r",\s*(?![^()\[\]{}]*[)\]}])", " ".join(text.split())):
        signature, _, releases = part.partition(" @")
        name, equals, default = signature.strip().partition("=")
        if name:
            value = default if equals else None
            arguments.append(Argument(name, value, _releases(releases.strip(), whole)))
    return tuple(arguments)


@cache
def rows() -> Mapping[str, Row]:
    """Every row by its path: functions, classes, and methods."""
    table: dict[str, Row] = {}
    for section, entries in _file()["api"].items():
        signatures = dict(entries)
        whole = _releases(signatures.pop("releases", ""), _ALL)
        if is_class(section):
            lists = [signatures.pop(key, "") for key in ("__init__", "attributes", "members")]
            table[section] = Row(section, whole, *(_arguments(text, whole) for text in lists))
        elif "releases" in entries:
            table[section] = Row(section, whole)
        for name, text in signatures.items():
            signature, _, releases = text.partition(";")
            several, path = _releases(releases.strip(), whole), f"{section}.{name}"
            table[path] = Row(path, several, _arguments(signature, several))
    return table


@cache
def notes() -> Mapping[tuple[str, str], Status]:
    """("names", "methods" or "arguments", path or name or `module.*`) -> its status."""
    kinds: dict[str, Kind] = {"no-effect": "without effect", "refused": "refused"}
    return {
        (what, name): Status(kind, group["why"])
        for section, kind in kinds.items()
        for group in _file()[section]
        for what in ("names", "arguments", "methods")
        for name in group.get(what, "").split()
    }


def noted(path: str) -> Status | None:
    """What the table says of a method by its path, or of every method of this name."""
    return notes().get(("names", path)) or notes().get(("methods", path.rpartition(".")[2]))


def noted_argument(path: str, name: str) -> Status:
    """What the table says of an argument of a row, or of every argument of this name."""
    unknown = notes().get(("arguments", name), Status("unknown"))
    return notes().get(("arguments", f"{path}.{name}"), unknown)


def status(path: str) -> Status:
    """What a function, class, method, or module of the API is in irc."""
    near = [path, *(other for other in _same_names(path) if _is_around(path, other))]
    parts = path.split(".")
    groups = [".".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1)]
    is_supported = path == "__version__" or find(path) is not None or path in modules()
    named = [*near, *([] if is_supported else groups)]
    reasons = (notes()["names", name] for name in named if ("names", name) in notes())
    reason = next(reasons, SUPPORTED if is_supported else Status("unknown"))
    if reason.kind == "refused" and parts[0] == "models" and _family(parts[-1]) in _families():
        return replace(
            reason, why=f"{reason.why}; or compile its folder of transformers: {_COMPILE}"
        )
    return reason


def _family(name: str) -> str:
    """What the classes of a family begin with, in lower case: gptj of GPTJForCausalLM."""
    return re.sub(
        r"(For[A-Z]\w*|LMHeadModel|Model|Config|Encoder|VisionTransformer)$", "", name
    ).lower()


def _families() -> frozenset[str]:
    """The families that `irc compile` loads from folders of transformers."""
    from ..models import FAMILIES

    return frozenset(_family(architecture) for _, architecture in FAMILIES)


def _is_around(path: str, other: str) -> bool:
    """Whether one of two modules, which have a name in common, contains the other."""
    module, elsewhere = path.rpartition(".")[0], other.rpartition(".")[0]
    return f"{elsewhere}.".startswith(f"{module}.") or f"{module}.".startswith(f"{elsewhere}.")


@cache
def modules() -> frozenset[str]:
    """Every module with a known name, and the packages around it."""
    names: set[str] = set()
    for path in _paths():
        parts = path.removesuffix(".*").split(".")
        while parts := parts[:-1]:
            if not is_class(".".join(parts)):
                names.add(".".join(parts))
    return frozenset(names)


def is_module(path: str) -> bool:
    """Whether a path is a module of the API, supported or not."""
    parts = path.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    is_below = parts[-1].islower() and any(("names", f"{each}.*") in notes() for each in around)
    return path in modules() or is_below


# -- the objects of irc


_OBJECTS: dict[str, dict[frozenset[int], Any]] = {}  # by path and releases
_CALLS: dict[str, dict[frozenset[int], Call]] = {}  # how the calls of each are bound


@cache
def load() -> None:
    """Import the modules that declare names, which import this one."""
    for name in _file()["declared-in"].split():
        import_module(f".{name}", __package__)


def release() -> int:
    """The number N of the release 0.N that the session's script is written for."""
    return current_session().release


def _in_release(table: Mapping[str, Mapping[frozenset[int], Any]], path: str) -> Any:
    return next((value for of, value in table.get(path, {}).items() if release() in of), None)


def find(path: str) -> Any:
    """The object with this path in the release of the session, or None.

    A package has the names of its modules, and a module those that it may import from others.
    """
    load()
    objects = (_in_release(_OBJECTS, name) for name in (path, *_same_names(path)))
    return next((value for value in objects if value is not None), None)


def row_of(path: str) -> Row | None:
    """The row of a path, of the name that a module exports, or of what ColumnLinear stands for."""
    paths = [name for name in (path, *_same_names(path)) if name in rows()]
    if not paths and (target := find(path)) is not None:
        paths = [name for name in rows() if _in_release(_OBJECTS, name) is target]
    return rows()[paths[0]] if paths else None


def rows_of_classes(classes: Sequence[type]) -> list[Row]:
    """The rows of some classes."""
    return [row for path, row in rows().items() if _in_release(_OBJECTS, path) in classes]


@cache
def _paths() -> list[str]:
    """Every path of the table."""
    load()
    return [*_OBJECTS, *rows(), *(name for what, name in notes() if what == "names")]


@cache
def _by_name() -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for path in dict.fromkeys(_paths()):
        if not _is_member(path):
            paths.setdefault(path.rpartition(".")[2], []).append(path)
    return paths


def _same_names(path: str) -> list[str]:
    """The paths of the same name in other modules, those below the module first.

    Functions of models, such as `models.convert_utils.split`, are others than those of functional.
    """
    module, _, name = path.rpartition(".")
    if is_class(module) or (not module and name not in _file()["exports"].split()):
        return []
    others = [other for other in _by_name().get(name, []) if other != path]
    if module.startswith("models.") and name.islower():
        others = [other for other in others if other.startswith("models.")]
    return sorted(others, key=lambda other: (not other.startswith(f"{module}."), other))


def is_class(path: str) -> bool:
    return path.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_member(path: str) -> bool:
    return is_class(path.rpartition(".")[0])


def register(path: str, value: Any, releases: str = "") -> Any:
    """Let scripts of some releases ("0.5-0.7") find an object by its path below `tensorrt_llm`."""
    several = _releases(releases, _ALL)
    registered = _OBJECTS.setdefault(path, {})
    if any(several & others for others in registered):
        raise TypeError(f"{path} is declared twice")
    registered[several] = value
    return value


def call_of(path: str) -> Call | None:
    """How the calls of a row are bound in the session's release, else in any; None: not by irc."""
    load()
    calls = _CALLS.get(path, {})
    return _in_release(_CALLS, path) or next(iter(calls.values()), None)


def implemented(path: str) -> frozenset[str]:
    """The arguments of a row that its implementation takes."""
    call = call_of(path)
    return frozenset() if call is None else call.taken


def argument_status(path: str, name: str) -> Status:
    """What an argument of a row is."""
    call = call_of(path)
    return noted_argument(path, name) if call is None else call.status(name)


def declared() -> Iterator[str]:
    """The paths of all objects of irc that scripts find."""
    load()
    return iter(_OBJECTS)


# Calls (function, self or (), arguments) of irc's tensors for a script; `arithmetic` adds it.
border: list[Callable[..., Any]] = []

# -- the decorator


def api(path: str, *, inner: bool = False, releases: str = "") -> Callable[[Declared], Declared]:
    """Declare a function, class, or enumeration of the API, and bind its calls by its row.

    Where the script leaves an argument out, the literal default of its release replaces that of
    the implementation, unless this is None. With `inner` a function, or the method `forward` of a
    class, gets irc's tensors in place of the script's, and its results are wrapped. `releases`,
    such as "0.5-0.7", tells implementations apart that share a path.
    """
    several = _releases(releases, _ALL)

    def declare(target: Any) -> Any:
        if not inspect.isclass(target):
            function = getattr(target, "__unbound__", target)  # of another path
            bound = _bound(path, function, several, is_method=False, inner=inner)
            return register(path, bound, releases)
        if not issubclass(target, Enum):
            bind_methods(path, target, several, inner)
        return register(path, target, releases)

    return declare


def declare(path: str, module: ModuleType, names: str = "") -> None:
    """Declare what a module of irc defines under names that have a row, and other `names`.

    Scripts get them bound; the attributes of the module stay as they are, for calls within irc.
    """
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", "") == module.__name__
        if (is_own and f"{path}.{name}" in rows()) or name in names.split():
            api(f"{path}.{name}")(value)


def bind_methods(
    path: str, target: type, releases: frozenset[int] = _ALL, inner: bool = False
) -> None:
    """Bind the constructor and the methods that have a row, also those that are inherited."""
    for row in rows().values():
        owner, _, method = row.path.rpartition(".")
        if path not in (owner, row.path) or not row.releases & releases:
            continue
        name = "__init__" if row.path == path else method
        value = next((vars(base)[name] for base in target.__mro__ if name in vars(base)), None)
        function = getattr(value, "__func__", value)
        if not inspect.isfunction(function) or (row.path == path and not row.arguments):
            continue
        is_method = not isinstance(value, staticmethod)
        function = getattr(function, "__unbound__", function)
        bound: Any = _bound(row.path, function, releases, is_method, inner and name == "forward")
        if isinstance(value, (classmethod, staticmethod)):
            bound = type(cast("Any", value))(bound)
        setattr(target, name, bound)
    for (what, name), note in notes().items():
        owner, _, member = name.rpartition(".")
        if (what, owner, note.kind) == ("names", path, "refused") and not hasattr(target, member):
            setattr(target, member, property(partial(_refuse, f"{name}: {note.why}")))


def _refuse(message: str, _: object) -> None:
    """What reading a method or attribute does that the table refuses."""
    raise ScriptError(message)


def _bound(
    path: str, function: Bound, releases: frozenset[int], is_method: bool, inner: bool
) -> Bound:
    """`function` whose calls are bound by the row at `path`; itself where there is no row."""
    if path not in rows():
        return function
    parameters = dict(list(inspect.signature(function).parameters.items())[int(is_method) :])
    title = ".".join(path.split(".")[-2 if _is_member(path) else -1 :])
    call = Call(rows()[path], title, parameters)
    _CALLS.setdefault(path, {})[releases] = call

    @wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        given = call.bind(args[int(is_method) :], kwargs)
        if not inner:
            return function(*args[: int(is_method)], **given)
        return border[0](function, args[: int(is_method)], given)

    cast("Any", bound).__unbound__ = function
    return cast("Bound", bound)


@dataclass(frozen=True)
class Call:
    """How calls of one implementation are bound."""

    row: Row
    title: str
    parameters: Mapping[str, inspect.Parameter]

    @cached_property
    def takes_fields(self) -> bool:
        """Whether the implementation has `**fields`: it gets every argument of the release."""
        return any(param.kind is param.VAR_KEYWORD for param in self.parameters.values())

    @cached_property
    def taken(self) -> frozenset[str]:
        """The arguments of the implementation; with `**fields` all that the table does not note."""
        path, names = self.row.path, self.row.names if self.takes_fields else ()
        fields = {name for name in names if noted_argument(path, name).kind == "unknown"}
        return frozenset(self.parameters) | fields

    def status(self, name: str) -> Status:
        """What an argument is."""
        return SUPPORTED if name in self.taken else noted_argument(self.row.path, name)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that the implementation gets."""
        by_position, by_keyword = self.row.of(release())
        names = [arg.name for arg in by_position]
        if len(args) > len(names):
            raise ScriptError(
                f"{self.title} takes {len(names)} positional arguments in TensorRT-LLM "
                f"{RELEASES[release()]}, found {len(args)}: expected {', '.join(names) or 'none'}"
            )
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & kwargs:
            raise ScriptError(f"{self.title}: the argument {min(twice)} is given twice")
        given |= kwargs
        arguments = {arg.name: arg for arg in (*by_position, *by_keyword)}
        bound = {n: value for n, value in given.items() if self._takes(n, value, arguments.get(n))}
        needed = [name for name, parameter in self.parameters.items() if _is_required(parameter)]
        for name, argument in arguments.items():
            if name in bound or name not in self.taken:
                continue
            parameter = self.parameters.get(name)
            if parameter is not None:
                if parameter.default is not None and argument.value is not _EMPTY:
                    bound[name] = argument.value
            elif argument.default is not None:
                bound[name] = None if argument.value is _EMPTY else argument.value
            elif name in names:
                needed.insert(0, name)
        if missing := [name for name in needed if name not in bound]:
            raise ScriptError(f"{self.title} needs {', '.join(missing)}")
        return bound

    def _takes(self, name: str, value: Any, argument: Argument | None) -> bool:
        """Whether the implementation gets an argument; an Error where it is refused or unknown."""
        if name in self.taken:
            return True
        if name not in self.row.names:
            if self.row.takes_any and self.takes_fields:
                return True
            near = did_you_mean(name, sorted(self.row.names | set(self.parameters)))
            raise ScriptError(f"{self.title} has no argument {name!r}{near}")
        if _is_off(value, _EMPTY if argument is None else argument.value):
            return False
        note = self.status(name)
        if note.kind == "without effect":
            current_session().note(f"{self.title}: {name} has no effect: {note.why}")
            return False
        why = note.why or "irc has no counterpart; leave it out"
        raise ScriptError(f"{self.title}: {name} is not supported: {why}")


def _is_required(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of an implementation has no default."""
    kinds = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is _EMPTY and parameter.kind not in kinds


def _is_off(value: Any, default: Any) -> bool:
    """Whether a value asks for nothing: None, False, 0, nothing in it, or the default."""
    kind: Any = value.__class__
    if hasattr(kind, "is_off"):
        return bool(kind.is_off(value))
    if value is None or (isinstance(value, (int, float, *_CONTAINERS)) and not value):
        return True
    if isinstance(value, Enum):
        return value.value in (0, "", None)
    return kind in (int, float, str, bool) and value == default


def names_of(module: str) -> Iterator[str]:
    """The supported names of a module, and of those below it for a package."""
    if not module:
        return iter(_file()["exports"].split())
    below = (path for path in declared() if path.startswith(f"{module}.") and not _is_member(path))
    return (path.rpartition(".")[2] for path in below)


def fields(path: str, every: bool = False) -> dict[str, Any]:
    """The arguments of a row in the session's, or in every, release.

    With their literal defaults, else None.
    """
    by_position, by_keyword = rows()[path].of(release())
    arguments = rows()[path].arguments if every else (*by_position, *by_keyword)
    return {arg.name: None if arg.value is _EMPTY else arg.value for arg in arguments}


def suggestion(module: str, name: str) -> str:
    """`; did you mean ...?` among the names of a module."""
    return did_you_mean(name, sorted(set(names_of(module))))
