"""`Declared`: a source or a step, whose text derives from the fields of its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeAlias, cast

from ..ir.string_literals import quote

Sizes: TypeAlias = tuple[int, ...]  # [8, 16]
File: TypeAlias = Annotated[str, "file"]  # @ckpt
Dtype: TypeAlias = Annotated[str, "dtype"]  # bf16
TypeDtype: TypeAlias = Annotated[str, "type"]  # f32 of a type f32[8, 16]
TypeShape: TypeAlias = Annotated[Sizes, "type"]  # [8, 16] of a type, after its dtype
Order: TypeAlias = Annotated[tuple[int, ...], "order"]  # 1, 0
Axes: TypeAlias = Annotated[tuple[str, ...], "axes"]  # dp.tp
Along: TypeAlias = Annotated[int, "along"]  # ; 0

SEPARATORS: dict[Any, str] = {Along: ";", TypeShape: ""}  # before an argument; others have ","


class Declared:
    """`keyword(arguments)`: the fields that a class annotates itself are the arguments, in order.

    Trailing arguments that have their defaults are not written. A class with a keyword is found in
    the `registry` of its base, by which irc/text/references.py parses it.
    """

    registry: ClassVar[dict[str, Any]]
    keyword: ClassVar[str]
    arguments: ClassVar[dict[str, Any]] = {}  # annotations by field
    defaults: ClassVar[dict[str, Any]] = {}
    # per argument its name, the separator before it, and how its value is written
    writers: ClassVar[list[tuple[str, str, Callable[[Any], str]]]] = []

    def __init_subclass__(cls, keyword: str = "") -> None:
        if keyword:
            if keyword in cls.registry:
                raise ValueError(f"the reference {keyword!r} is declared twice")
            cls.keyword, cls.registry[keyword] = keyword, cls
            cls.arguments = inspect.get_annotations(cls, eval_str=True)
            cls.defaults = {name: vars(cls)[name] for name in cls.arguments if name in vars(cls)}
            separators = [f"{SEPARATORS.get(k, ',')} ".lstrip() for k in cls.arguments.values()]
            writers = [_TEXTS.get(kind, _plain) for kind in cls.arguments.values()]
            cls.writers = list(zip(cls.arguments, ["", *separators[1:]], writers, strict=True))

    def call_text(self) -> str:
        """`keyword(arguments)`."""
        count = len(self.writers)
        for name in reversed(self.defaults):
            if getattr(self, name) != self.defaults[name]:
                break
            count -= 1
        values = [sep + write(getattr(self, name)) for name, sep, write in self.writers[:count]]
        return f"{self.keyword}({''.join(values)})"


def separated(items: Iterable[Any]) -> str:
    """`a, b`."""
    return ", ".join(map(str, items))


def bracketed(sizes: Iterable[Any]) -> str:
    """`[8, 16]`."""
    return f"[{separated(sizes)}]"


def _plain(value: Any) -> str:
    return separated(cast("Sizes", value)) if isinstance(value, tuple) else str(value)


_TEXTS: dict[Any, Callable[[Any], str]] = {
    str: quote,
    File: "@{}".format,
    Axes: ".".join,
    Sizes: bracketed,
    Sizes | None: bracketed,
    TypeShape: bracketed,
}
