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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar, cast, overload

from ...errors import Error, did_you_mean
from ...source import here
from .context import current_session, minor

Kind = Literal["supported", "without effect", "refused", "unknown"]
Bound = TypeVar("Bound", bound=Callable[..., Any])
Declared = TypeVar("Declared")
ROOT = "tensorrt_llm"
RELEASES = {5: "0.5.0", 6: "0.6.1", 7: "0.7.1", **{n: f"0.{n}.0" for n in range(8, 17)}}
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
        return frozenset(each.name for each in self.arguments if each.name != "*")

    @property
    def takes_any(self) -> bool:
        """Whether a call may have keywords of the script's own (`**`)."""
        return "**" in self.names

    def of(self, release: int) -> tuple[list[Argument], list[Argument]]:
        """The arguments that release 0.N takes (by position or keyword, by keyword only).

        Of a name that the release lacks they are those of the nearest that has it.
        """
        release = min(self.releases, key=lambda each: (abs(each - release), each))
        arguments = [
            each for each in self.arguments if release in each.releases and each.name != "**"
        ]
        star = next((i for i, each in enumerate(arguments) if each.name == "*"), len(arguments))
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
        is_class = _is_class(section)
        whole = _releases(entries.get("releases", ""), _ALL)
        fields = {
            kind: _arguments(entries.get(kind, ""), whole)
            for kind in ("attributes", "members") if is_class
        }  # fmt: skip
        if is_class:
            own = _arguments(entries.get("__init__", ""), whole)
            table[section] = Row(section, whole, own, **fields)
        if not is_class and "releases" in entries:
            table[section] = Row(section, whole)
        for name, text in entries.items():
            if name == "releases" or (
                is_class and name in ("releases", "attributes", "members", "__init__")
            ):
                continue
            signature, _, releases = text.partition(";")
            several = _releases(releases.strip(), whole)
            table[f"{section}.{name}"] = Row(
                f"{section}.{name}", several, _arguments(signature, several)
            )
    return table


@cache
def notes() -> dict[tuple[str, str], Status]:
    """("names" or "arguments", path or argument or `module.*`) -> its status."""
    reasons: dict[tuple[str, str], Status] = {}
    for section, kind in (("no-effect", "without effect"), ("refused", "refused")):
        for group in _file()[section]:
            for what in ("names", "arguments", "methods"):
                for name in group.get(what, "").split():
                    reasons[what, name] = Status(cast("Kind", kind), group["why"])
    return reasons


def argument_status(path: str, name: str, taken: frozenset[str] | None = None) -> Status:
    """What an argument of a row is; `taken` are those of the implementation of irc."""
    note = notes().get(("arguments", f"{path}.{name}")) or notes().get(("arguments", name))
    if note is not None and taken is None and not is_bound(path):
        return note
    taken = implemented(path) if taken is None else taken
    return SUPPORTED if taken is not None and name in taken else note or Status("unknown")


def noted(path: str, method: str) -> Status | None:
    """What the table says of a method by its path, or of every method of this name."""
    return notes().get(("names", path)) or notes().get(("methods", method))


def status(path: str) -> Status:
    """What a function, class, method, or module of the API is in irc."""
    note = _note_of(path)
    if note is not None:
        return note
    if path == "__version__" or find(path) is not None or path in modules():
        return SUPPORTED
    parts = path.split(".")
    patterns = (".".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1))
    wildcards = (notes().get(("names", pattern)) for pattern in patterns)
    return next((each for each in wildcards if each is not None), Status("unknown"))


@cache
def _note_of(path: str) -> Status | None:
    """The note of a path, or of the same name in a package around its module or a module below."""
    own = notes().get(("names", path))
    module, _, name = path.rpartition(".")
    if own is not None or _is_class(module):
        return own
    for what, other in notes():
        elsewhere, _, same = other.rpartition(".")
        is_near = elsewhere.startswith(f"{module}.") or module.startswith(f"{elsewhere}.")
        if what == "names" and same == name and module and elsewhere and is_near:
            return notes()[what, other]
    return None


@cache
def modules() -> frozenset[str]:
    """Every module with a known name, and the packages around it."""
    load()
    paths = [*_OBJECTS, *rows(), *(name for what, name in notes() if what == "names")]
    names: set[str] = set()
    for path in paths:
        parts = path.removesuffix(".*").split(".")
        while parts := parts[:-1]:
            if not _is_class(".".join(parts)):
                names.add(".".join(parts))
    return frozenset(names)


def is_module(path: str) -> bool:
    """Whether a path is a module of the API, supported or not."""
    parts = path.split(".")
    if path in modules() or (("names", f"{path}.*") in notes()):
        return True
    parents = (".".join(parts[:count]) for count in range(1, len(parts)))
    return parts[-1].islower() and any(("names", f"{each}.*") in notes() for each in parents)


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
    return next((each for of, each in table.get(path, {}).items() if release() in of), None)


def find(path: str) -> Any:
    """The object with this path in the release of the session, or None.

    A package has the names of its modules, and a module those that it may import from others.
    """
    load()
    objects = (_in_release(_OBJECTS, each) for each in (path, *_exporters(path)))
    return next((each for each in objects if each is not None), None)


def alias_of(path: str) -> str | None:
    """The path with a row of the object that another path, as of ColumnLinear, stands for."""
    target = find(path)
    others = (each for each in rows() if target is not None and each in _OBJECTS)
    return next((each for each in others if _in_release(_OBJECTS, each) is target), None)


@cache
def _by_name() -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for path in _OBJECTS:
        if not _is_member(path):
            paths.setdefault(path.rpartition(".")[2], []).append(path)
    return paths


def _exporters(path: str) -> list[str]:
    """The paths of the same name elsewhere, those below the module first."""
    module, _, name = path.rpartition(".")
    if _is_class(module) or (not module and name not in _file()["exports"].split()):
        return []
    others = _by_name().get(name, [])
    return sorted(others, key=lambda each: (not each.startswith(f"{module}."), each))


def _is_class(path: str) -> bool:
    return path.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_member(path: str) -> bool:
    return _is_class(path.rpartition(".")[0])


def register(path: str, value: Any, releases: str = "") -> Any:
    """Let scripts of some releases ("0.5-0.7") find an object by its path below `tensorrt_llm`."""
    several = _releases(releases, _ALL)
    registered = _OBJECTS.setdefault(path, {})
    if any(several & others for others in registered):
        raise TypeError(f"{path} is declared twice")
    registered[several] = value
    return value


def implemented(path: str) -> frozenset[str] | None:
    """The arguments that irc's implementation of a row has; None where there is none."""
    call = call_of(path)
    if call is not None:
        return call.taken
    owner, _, name = path.rpartition(".")
    target = getattr(find(owner), name, None) if _is_member(path) else find(path)
    if target is None:
        return None
    try:
        return _names_taken(rows()[path], inspect.signature(target).parameters)
    except (TypeError, ValueError, KeyError):
        return None


def call_of(path: str) -> Call | None:
    """How the calls of a row are bound in the session's release; None where irc does not."""
    load()
    return cast("Call | None", _in_release(_CALLS, path))


def is_bound(path: str) -> bool:
    """Whether the calls of a row are bound in the session's release."""
    return call_of(path) is not None


def declared() -> Iterator[str]:
    """The paths of all objects of irc that scripts find."""
    load()
    return iter(_OBJECTS)


def _names_taken(row: Row, parameters: Mapping[str, inspect.Parameter]) -> frozenset[str]:
    """The arguments that an implementation has; one with `**fields` has all that no note names."""
    names = frozenset(parameters) - {"self"}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return names
    noted = {
        n for n in row.names if {("arguments", n), ("arguments", f"{row.path}.{n}")} & {*notes()}
    }
    return names | (row.names - noted)


_BORDER: list[Callable[..., Any]] = []  # calls a function of irc's tensors for a script


def border(function: Bound) -> Bound:
    """Declare how a script calls functions of irc's tensors: (function, self or (), arguments)."""
    _BORDER.append(function)
    return function


# -- the decorator


class _InnerDeclarer(Protocol):
    """A decorator after which classes are what they were, and functions take other tensors."""

    @overload
    def __call__(self, target: type[Declared], /) -> type[Declared]: ...
    @overload
    def __call__(self, target: Callable[..., Any], /) -> Any: ...


@overload
def api(path: str, *, releases: str = "") -> Callable[[Declared], Declared]: ...
@overload
def api(path: str, *, inner: bool, releases: str = "") -> _InnerDeclarer: ...
def api(path: str, *, inner: bool = False, releases: str = "") -> Any:
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
    for row in [each for each in rows() if each == path or each.rpartition(".")[0] == path]:
        name = "__init__" if row == path else row.rpartition(".")[2]
        value = next((vars(each)[name] for each in target.__mro__ if name in vars(each)), None)
        function = getattr(value, "__func__", value)
        if not inspect.isfunction(function) or (row == path and not rows()[row].arguments):
            continue
        if not rows()[row].releases & releases:
            continue
        is_method = not isinstance(value, staticmethod)
        function = getattr(function, "__unbound__", function)
        bound: Any = _bound(row, function, releases, is_method, inner and name == "forward")
        if isinstance(value, (classmethod, staticmethod)):
            bound = type(cast("Any", value))(bound)
        setattr(target, name, bound)


def _bound(
    path: str, function: Bound, releases: frozenset[int], is_method: bool, inner: bool
) -> Bound:
    """`function` whose calls are bound by the row at `path`; itself where there is no row."""
    row = rows().get(path)
    if row is None:
        return function
    parameters = dict(list(inspect.signature(function).parameters.items())[int(is_method) :])
    parts = path.split(".")
    title = ".".join(parts[-2:]) if _is_member(path) else parts[-1]
    call = Call(row, title, parameters, _names_taken(row, parameters))
    _CALLS.setdefault(path, {})[releases] = call

    @wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        given = call.bind(args[int(is_method) :], kwargs)
        if not inner:
            return function(*args[: int(is_method)], **given)
        return _BORDER[0](function, args[: int(is_method)], given)

    cast("Any", bound).__unbound__ = function
    return cast("Bound", bound)


@dataclass(frozen=True)
class Call:
    """How calls of one implementation are bound."""

    row: Row
    title: str
    parameters: Mapping[str, inspect.Parameter]
    taken: frozenset[str]

    @cached_property
    def takes_fields(self) -> bool:
        """Whether the implementation has `**fields`: it gets every argument of the release."""
        return any(each.kind is each.VAR_KEYWORD for each in self.parameters.values())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that the implementation gets."""
        by_position, by_keyword = self.row.of(release())
        given = dict(zip((each.name for each in by_position), args, strict=False))
        if len(args) > len(by_position):
            raise Error(
                f"{self.title} takes {len(by_position)} positional arguments in TensorRT-LLM "
                f"{RELEASES[release()]}, found {len(args)}: expected "
                f"{', '.join(each.name for each in by_position) or 'none'}",
                loc=here(),
            )
        for name in kwargs:
            if name in given:
                raise Error(f"{self.title}: the argument {name} is given twice", loc=here())
        given |= kwargs
        defaults = {each.name: each for each in (*by_position, *by_keyword)}
        bound = {n: value for n, value in given.items() if self._takes(n, value, defaults.get(n))}
        for name, argument in defaults.items():
            parameter = self.parameters.get(name)
            if name in bound or name not in self.taken:
                continue
            if parameter is None and argument.default is not None:
                bound[name] = None if argument.value is _EMPTY else argument.value
            elif parameter is not None and parameter.default not in (None, argument.value):
                bound |= {name: argument.value} if argument.value is not _EMPTY else {}
        required = [each.name for each in by_position if each.default is None]
        self._check_required(bound, required if self.takes_fields else [])
        return bound

    def _takes(self, name: str, value: Any, argument: Argument | None) -> bool:
        """Whether the implementation gets an argument; an Error where it is refused or unknown."""
        if name in self.taken:
            return True
        if name not in self.row.names:
            if self.row.takes_any and self.takes_fields:
                return True
            near = did_you_mean(name, sorted(self.row.names | set(self.parameters)))
            raise Error(f"{self.title} has no argument {name!r}{near}", loc=here())
        note = argument_status(self.row.path, name, self.taken)
        if note.kind == "without effect":
            default = _EMPTY if argument is None else argument.value
            if not _is_off(value, default):
                current_session().note(f"{self.title}: {name} has no effect: {note.why}")
            return False
        if _is_off(value, _EMPTY if argument is None else argument.value):
            return False
        why = note.why or "irc has no counterpart; leave it out"
        raise Error(f"{self.title}: {name} is not supported: {why}", loc=here())

    def _check_required(self, bound: Mapping[str, Any], required: list[str]) -> None:
        missing = [name for name in required if name not in bound and name not in self.parameters]
        missing += [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is _EMPTY
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and name not in bound
        ]
        if missing:
            raise Error(f"{self.title} needs {', '.join(missing)}", loc=here())


def _is_off(value: Any, default: Any) -> bool:
    """Whether a value asks for nothing: None, False, 0, nothing in it, or the default."""
    if value is None or value is False or (isinstance(value, (int, float)) and value == 0):
        return True
    if isinstance(value, _CONTAINERS) and not value:
        return True
    if isinstance(value, Enum) and value.value in (0, "", None):
        return True
    kind: Any = cast("Any", value).__class__
    is_off = getattr(kind, "is_off", None)
    if is_off is not None:
        return bool(is_off(value))
    return kind in (int, float, str, bool) and value == default


def names_of(module: str) -> Iterator[str]:
    """The supported names of a module, and of those below it for a package."""
    load()
    if not module:
        yield from _file()["exports"].split()
        return
    prefix = f"{module}."
    for path in _OBJECTS:
        if path.startswith(prefix) and not _is_member(path):
            yield path.rpartition(".")[2]


def fields(path: str, every: bool = False) -> dict[str, Any]:
    """The arguments of a row in the session's, or in every, release.

    With their literal defaults, else None.
    """
    by_position, by_keyword = rows()[path].of(release())
    arguments = rows()[path].arguments if every else (*by_position, *by_keyword)
    return {each.name: None if each.value is _EMPTY else each.value for each in arguments}


def suggestion(module: str, name: str) -> str:
    """`; did you mean ...?` among the names of a module."""
    return did_you_mean(name, sorted(set(names_of(module))))
