"""`Pass` and `@register`: a transformation is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from ..core import Module
from ..errors import Error
from ..rewrite.stats import Stats
from ..user_files import watch
from .options import Kind, kind_of, literal

PASSES: dict[str, type[Pass]] = {}
watch("pass", PASSES)

PassClass = TypeVar("PassClass", bound="type[Pass]")


@dataclasses.dataclass(frozen=True)
class Pass(ABC):
    """One transformation of a module. The fields of a subclass are its options."""

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Kind]]

    @abstractmethod
    def run(self, module: Module, stats: Stats) -> None:
        """Change the module in place and count in `stats` what was done."""

    def __str__(self) -> str:
        given = [
            f"{field.name.replace('_', '-')}={literal(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if not _is_default(field, getattr(self, field.name))
        ]
        return self.name + (f"{{{', '.join(given)}}}" if given else "")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of an option, or `dataclasses.MISSING` where it has to be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = default_of(field)
    return type(default) is type(value) and literal(default) == literal(value)


@dataclass_transform(frozen_default=True)
def register(name: str) -> Callable[[PassClass], PassClass]:
    """Make a class known as the pass `name`, and a frozen dataclass of its annotated options."""

    def wrap(cls: PassClass) -> PassClass:
        known = PASSES.get(name)
        if known is not None:
            raise Error(
                f"a pass called {name!r} is registered already, by {known.__module__}; "
                "choose another name"
            )
        _copy_list_defaults(cls)
        try:
            made = dataclasses.dataclass(frozen=True)(cls)
        except TypeError as error:  # an option without a default after one that has it
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
    """Let `exclude: list[str] = []` mean a new list per pass, which dataclasses refuse."""
    for option in inspect.get_annotations(cls):
        default = cls.__dict__.get(option)
        if isinstance(default, list):
            copy = partial(list[Any], cast("list[Any]", default))
            setattr(cls, option, dataclasses.field(default_factory=copy))


def describe_options(cls: type[Pass]) -> list[tuple[str, str, str]]:
    """(option, what it takes, its default as text or empty) for every option of a pass."""
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(cls):
        default = default_of(field)
        text = "" if default is dataclasses.MISSING else literal(default)
        rows.append((field.name.replace("_", "-"), str(cls.kinds[field.name]), text))
    return rows
