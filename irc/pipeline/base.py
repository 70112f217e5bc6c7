"""`Pass` and `@register`: a pass is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from ..errors import Error
from ..extensions.user_files import origin, watch
from ..ir.core import Module
from ..rewrite.stats import Stats
from ..text.printer import literal
from .options import Kind, kind_of

PASSES: dict[str, type[Pass]] = {}
watch("pass", PASSES)

PassClass = TypeVar("PassClass", bound="type[Pass]")


@dataclasses.dataclass(frozen=True)
class Pass(ABC):
    """A transformation of a module. The fields of a subclass are its options."""

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Kind]]

    @abstractmethod
    def run(self, module: Module, stats: Stats) -> None:
        """Transform the module in place and count changes in `stats`."""

    @classmethod
    def known_values(cls) -> dict[str, dict[str, str]]:
        """For options that take names: the names, and what each means."""
        return {}

    def __str__(self) -> str:
        options = [
            f"{field.name.replace('_', '-')}={literal(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if not _is_default(field, getattr(self, field.name))
        ]
        return self.name + (f"{{{', '.join(options)}}}" if options else "")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of an option, or `dataclasses.MISSING` if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = default_of(field)
    return type(default) is type(value) and literal(default) == literal(value)


@dataclass_transform(frozen_default=True)
def register(name: str) -> Callable[[PassClass], PassClass]:
    """Register a class as the pass `name`, as a frozen dataclass of its annotated options."""

    def wrap(cls: PassClass) -> PassClass:
        known = PASSES.get(name)
        if known is not None:
            raise Error(
                f"a pass called {name!r} is registered already, by {origin(known)}; "
                "choose another name"
            )
        _copy_list_defaults(cls)
        try:
            made = dataclasses.dataclass(frozen=True)(cls)
        except TypeError as error:  # a required option after one with a default
            raise Error(f"pass {name}: {error}") from None
        hints = typing.get_type_hints(made)
        kinds: dict[str, Kind] = {}
        for field in dataclasses.fields(made):
            try:
                kinds[field.name] = kind_of(hints[field.name])
            except Error as error:
                raise Error(f"pass {name}: option {field.name}: {error.message}") from None
        made.name, made.kinds = name, kinds
        PASSES[name] = made
        return made

    return wrap


def _copy_list_defaults(cls: type[Pass]) -> None:
    """Replace the list default of an option, which dataclasses refuse, by a copying factory."""
    for option in inspect.get_annotations(cls):
        default = cls.__dict__.get(option)
        if isinstance(default, list):
            copy = partial(list[Any], cast("list[Any]", default))
            setattr(cls, option, dataclasses.field(default_factory=copy))


def describe_options(cls: type[Pass]) -> list[tuple[str, str, str]]:
    """(option, its kind, its default as text or empty) for every option of a pass."""
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(cls):
        default = default_of(field)
        text = "" if default is dataclasses.MISSING else literal(default)
        rows.append((field.name.replace("_", "-"), str(cls.kinds[field.name]), text))
    return rows
