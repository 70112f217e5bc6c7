"""`Pass` and `@register`: a pass is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

from ..errors import Error
from ..extensions.user_files import origin, watch
from ..ir.core import Module
from ..rewrite.stats import Stats
from ..text.printer import literal
from .options import Kind, Option, default_of, kind_of, option, settings_of

PASSES: dict[str, type[Pass]] = {}
watch("pass", PASSES)

RESERVED = ("default", "after", "before", "without")  # words of a pipeline's text

PassClass = TypeVar("PassClass", bound="type[Pass]")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What the passes of a compilation are filled with.

    `options` are those of `irc.compile` that passes declare and that are set, by keyword. `config`
    is the config.json of a checkpoint folder, at `config_path`, `cache_scales` the scales that the
    checkpoint has of caches of a kind; both are empty for other sources.
    """

    module: Module
    options: Mapping[str, Any]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    config_path: str = ""
    cache_scales: Callable[[str], Mapping[str, float]] = lambda kind: {}

    @property
    def is_sharded(self) -> bool:
        """Whether a value of the module is sharded already."""
        return any(value.type.sharded for op in self.module.ops() for value in op.results)


@dataclasses.dataclass(frozen=True)
class Pass(ABC):
    """A transformation of a module. The fields of a subclass are its options.

    `view`: the modules that it takes: any, those in the global view, or of these the unsharded
    ones. A compilation leaves the others out where a module is in the local view. Where an option
    of `irc.compile` asks for a pass that the backend's pipeline lacks, it comes behind those that
    `behind` names; `flag` is the option that asks for the pass as such. `changes_numbers`: whether
    the results change by design, beyond rounding to the dtypes of before.
    """

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Kind]]
    view: ClassVar[Literal["any", "global", "unsharded"]] = "any"
    behind: ClassVar[tuple[str, ...]] = ("inline",)
    flag: ClassVar[Option | None] = None
    changes_numbers: ClassVar[bool] = False

    @abstractmethod
    def run(self, module: Module, stats: Stats) -> None:
        """Transform the module in place and count changes in `stats`."""

    @classmethod
    def known_values(cls) -> dict[str, dict[str, str]]:
        """For options that take names: the names, and what each means."""
        return {}

    def configured(self, compilation: Compilation) -> Pass | None:
        """This pass with the options of a compilation; None where it has nothing to do there."""
        chosen = {
            setting.field: compilation.options[setting.keyword]
            for setting in settings_of(type(self)).values()
            if setting.field and setting.keyword in compilation.options
        }
        return dataclasses.replace(self, **chosen) if chosen else self

    def __str__(self) -> str:
        options = [
            f"{field.name.replace('_', '-')}={literal(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if not _is_default(field, getattr(self, field.name))
        ]
        return self.name + (f"{{{', '.join(options)}}}" if options else "")


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = default_of(field)
    return type(default) is type(value) and literal(default) == literal(value)


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
def register(name: str) -> Callable[[PassClass], PassClass]:
    """Register a class as the pass `name`, as a frozen dataclass of its annotated options."""

    def wrap(cls: PassClass) -> PassClass:
        if name in RESERVED:
            raise Error(f"{name} is a word of pipelines, not a name of a pass; choose another name")
        registered = PASSES.get(name)
        if registered is not None:
            raise Error(
                f"a pass called {name!r} is registered already, by {origin(registered)}; "
                "choose another name"
            )
        _copy_list_defaults(cls)
        try:
            declared = dataclasses.dataclass(frozen=True)(cls)
        except TypeError as error:  # a required option after one with a default
            raise Error(f"pass {name}: {error}") from None
        hints = typing.get_type_hints(declared)
        kinds: dict[str, Kind] = {}
        for field in dataclasses.fields(declared):
            try:
                kinds[field.name] = kind_of(hints[field.name])
            except Error as error:
                raise Error(f"pass {name}: option {field.name}: {error.message}") from None
        declared.name, declared.kinds = name, kinds
        PASSES[name] = declared
        return declared

    return wrap


def _copy_list_defaults(cls: type[Pass]) -> None:
    """Replace the list default of an option, which dataclasses refuse, by a copying factory."""
    for name in inspect.get_annotations(cls):
        default = cls.__dict__.get(name)
        if isinstance(default, list):
            copy = partial(list[Any], cast("list[Any]", default))
            setattr(cls, name, dataclasses.field(default_factory=copy))


def describe_options(cls: type[Pass]) -> list[tuple[str, str, str, str]]:
    """(option, its kind, its default as text or empty, its flag if it has one) of a pass."""
    flags = {setting.field: setting.flag for setting in settings_of(cls).values()}
    rows: list[tuple[str, str, str, str]] = []
    for field in dataclasses.fields(cls):
        default, name = default_of(field), field.name
        text = "" if default is dataclasses.MISSING else literal(default)
        rows.append((name.replace("_", "-"), str(cls.kinds[name]), text, flags.get(name, "")))
    return rows
