"""Parses weight references, by the declarations of their classes: `@ckpt["key"][0:64, :]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import Error
from ..weights import FileRef, Ref, Slice, Step
from ..weights.declare import (
    SEPARATORS,
    Along,
    Axes,
    Declared,
    Dtype,
    File,
    Order,
    Sizes,
    TypeDtype,
    TypeShape,
)
from ..weights.steps import StepBase
from .cursor import Cursor
from .literals import parse_type

_DEEPEST = 16
_MOST_STEPS = 256

D = TypeVar("D", bound=Declared)


def parse_ref(c: Cursor, files: Mapping[str, str]) -> Ref:
    """The reference at the cursor."""
    return _Parser(c, files).ref()


class _Parser:
    def __init__(self, cursor: Cursor, files: Mapping[str, str]) -> None:
        self.cursor, self.files, self.depth = cursor, files, 0

    def ref(self) -> Ref:
        c = self.cursor
        if self.depth > _DEEPEST:
            c.fail("this reference is nested too deeply")
        self.depth += 1
        ref = self.source()
        self.depth -= 1
        while c.token in ("[", "."):
            if len(ref.steps) == _MOST_STEPS:
                c.fail(f"this reference has more than {_MOST_STEPS} steps")
            ref = ref.then(self.slice() if c.token == "[" else self.step())
        return ref

    def source(self) -> Ref:
        c = self.cursor
        if c.token[:1] == "@":
            file = self.file()
            c.expect("[")
            key = c.string()
            c.expect("]")
            return FileRef(file, key)
        kind: type[Ref] | None = Ref.registry.get(c.token)
        if kind is None:
            c.fail(f"expected @file[...], {', '.join(Ref.registry)}, found {c.shown}")
        c.advance()
        return self.arguments(kind)

    def step(self) -> Step:
        c = self.cursor
        c.expect(".")
        name = c.word()
        kind: type[Step] | None = StepBase.registry.get(name)
        if kind is None:
            c.fail(f"no step called {name!r}; there are {', '.join(StepBase.registry)}", back=1)
        return self.arguments(kind)

    def arguments(self, kind: type[D]) -> D:
        """`(a, b)`, the fields of a class; its Error gets the place in the text."""
        c = self.cursor
        c.expect("(")
        values: list[Any] = []
        for name, annotation in kind.arguments.items():
            separator = SEPARATORS.get(annotation, ",") if values else ""
            if name in kind.defaults and c.token != separator:
                break
            if separator:
                c.expect(separator)
            values.append(_READERS[annotation](self))
        c.expect(")")
        try:
            return kind(*values)
        except Error as error:
            c.fail(error.message, back=1)

    def slice(self) -> Slice:
        c = self.cursor
        ranges: list[tuple[int, int] | None] = []
        for _ in c.items("[", "]"):
            if c.accept(":"):
                ranges.append(None)
            else:
                begin = c.integer()
                c.expect(":")
                ranges.append((begin, c.integer()))
        return Slice(tuple(ranges))

    def file(self) -> str:
        file = self.cursor.symbol()
        if file not in self.files:
            self.cursor.fail(f"there is no file @{file}", back=1)
        return file

    def number(self) -> float:
        c = self.cursor
        try:
            value = float(c.token)
        except ValueError:
            c.fail(f"expected a number, found {c.shown}")
        c.advance()
        return value

    def sizes(self) -> Sizes:
        c = self.cursor
        sizes: list[int] = []
        for _ in c.items("[", "]"):
            sizes.append(c.integer())
            if sizes[-1] < 0:
                c.fail("a size cannot be negative", back=1)
        return tuple(sizes)

    def type_dtype(self) -> str:
        """The dtype of the type at the cursor, whose sizes `type_sizes` reads."""
        return parse_type(self.cursor).dtype

    def type_sizes(self) -> Sizes:
        c = self.cursor
        type = parse_type(c)
        sizes = tuple(size for size in type.shape if isinstance(size, int))
        if type.sharded or len(sizes) != type.ndim:
            c.fail(f"{type} is not a dtype with sizes, such as f32[8, 16]")
        c.advance()
        return sizes

    def separated(self, separator: str, read: Callable[[], Any]) -> tuple[Any, ...]:
        """One or more items."""
        items = [read()]
        while self.cursor.accept(separator):
            items.append(read())
        return tuple(items)


_READERS: dict[Any, Callable[[_Parser], Any]] = {
    Ref: _Parser.ref,
    tuple[Ref, ...]: lambda parser: parser.separated(",", parser.ref),
    str: lambda parser: parser.cursor.string(),
    int: lambda parser: parser.cursor.integer(),
    float: _Parser.number,
    Along: lambda parser: parser.cursor.integer(),
    File: _Parser.file,
    Dtype: lambda parser: parser.cursor.word(),
    Axes: lambda parser: parser.separated(".", parser.cursor.word),
    Order: lambda parser: parser.separated(",", parser.cursor.integer),
    Sizes: _Parser.sizes,
    Sizes | None: _Parser.sizes,
    TypeDtype: _Parser.type_dtype,
    TypeShape: _Parser.type_sizes,
}
