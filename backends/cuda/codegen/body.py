"""Statements that compute elements of values, by following the operations that make them.

`Body.element` asks the table of an operation for the expression of one element, which asks for the
elements of the operands; it ends at values that are stored. So a chain of elementwise operations,
layout changes and gathers is one kernel. Every value is rounded to its dtype, so results do not
depend on what is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, Shape, symbol
from irc.ir.dtypes import DTYPES

Index: TypeAlias = tuple[str, ...]  # a C expression per dimension: a name or a number
# (body, op, number of the result, index) -> an expression
Element: TypeAlias = Callable[["Body", Any, int, Index], str]

ELEMENTS: dict[type[Op], Element] = {}

FOUR_BITS = [name for name, kind in DTYPES.items() if kind.bits == 4]
_WIDE = {"f64": "double", "i64": "long long", "u64": "u64", "u32": "u32", "bool": "bool"}
# dtype -> (C type of its elements in registers, function that rounds to the dtype)
REGISTERS = {
    name: (
        _WIDE.get(name, "float" if kind.is_float else "int"),
        f"round_{name}" if kind.bits < 32 and name != "bool" else "",
    )
    for name, kind in DTYPES.items()
}


def element(*classes: type[Op]) -> Callable[[Element], Element]:
    """Register how elements of an operation are computed."""

    def register(function: Element) -> Element:
        for cls in classes:
            assert cls not in ELEMENTS, cls.opname
            ELEMENTS[cls] = function
        return function

    return register


class Packs:
    """Elements that a thread computes at once: neighbours in the last dimension.

    `outer` and `inner` are the index of the pack. `strided`: whether a load has turned out to read
    no packs, for which one element per thread is better.
    """

    def __init__(self, size: int, outer: Index, inner: str, depth: int) -> None:
        self.size, self.outer, self.inner, self.depth = size, outer, inner, depth
        self.last: dict[str, int] = {}  # the last index of an element -> its place in the pack
        self.numbers: dict[str, int] = {}  # its number in row-major order -> the same
        self.stored: dict[int, str] = {}  # number of an output -> the variable of its pack
        self.strided = False
        self._counts: dict[Value, int] = {}

    def place(self, body: Body, value: Value, index: Index) -> tuple[int, str] | None:
        """(place in the pack, number of the pack in memory) of an element, if it is in one."""
        shape = value.type.shape
        if value.type.dtype in FOUR_BITS and self.size % 2:
            return None
        number = body.known_number(index, shape)
        if number in self.numbers:
            return self.numbers[number], "i"
        last = shape[-1] if shape else 1
        if not isinstance(last, int) or last % self.size or index[-1] not in self.last:
            return None
        place = body.flattened((*index[:-1], self.inner), (*shape[:-1], last // self.size))
        return self.last[index[-1]], place

    def block(self, index: str, size: DimLike) -> str | None:
        """The number of the block of `size` neighbours in which all elements of the pack lie."""
        found = None
        if index in self.outer and isinstance(size, int):
            found = f"{index} / {size}"
        elif index in self.last and isinstance(size, int) and size % self.size == 0:
            found = f"{self.inner} / {size // self.size}"
        if found is not None and found not in self.outer:
            self.outer = (*self.outer, found)
        return found

    def count(self, value: Value) -> None:
        """One more pack of the value; a thread should need few."""
        self._counts[value] = self._counts.get(value, 0) + 1
        self.strided |= self._counts[value] > 2


class Body:
    """The statements of a kernel, in nested blocks.

    `stored` are values in memory; the kernel gets a pointer to each that is read. Others are
    computed where they are used, once per block and index. `symbols` are the sizes that the
    statements use, which are arguments of the kernel.
    """

    def __init__(self, stored: Collection[Value] = ()) -> None:
        self.stored = stored
        self.lines: list[str] = []
        self.first: list[str] = []  # statements before `lines`
        self.early: list[str] = []  # statements before the kernel waits for the one in front of it
        self.read_early: list[Value] = []  # what these read
        self._once: dict[object, str] = {}
        self.pointers: dict[Value, str] = {}  # in the order of the kernel's arguments
        self.symbols: dict[str, None] = {}
        # elements of values, and numbers of elements of shapes, by index; per nested block
        self._known: list[dict[tuple[Value | Shape, Index], str]] = [{}]
        self.packs: Packs | None = None
        self._count = 0

    def element(self, value: Value, index: Sequence[str]) -> str:
        """The name of a variable with the element of `value` at `index`."""
        key = value, tuple(index)
        found = self._find(key)
        if found is not None:
            return found
        kind, rounding = REGISTERS[value.type.dtype]
        if value.producer is None or value in self.stored:
            found = self.packed(value, key[1])
            place = self.place(value, index)
            found = found or f"load<{value.type.dtype}>({self.pointer(value)}, {place})"
        else:
            found = self._computed(value, key[1])
            found = found if not rounding or _moves(value) else f"{rounding}({found})"
        name = self._known[-1][key] = self.variable(kind, found)
        return name

    def give(self, value: Value, index: Index, name: str) -> None:
        """The element of `value` at `index` is in this variable."""
        self._known[-1][value, index] = name

    def _find(self, key: tuple[Value | Shape, Index]) -> str | None:
        return next((known[key] for known in reversed(self._known) if key in known), None)

    def packed(self, value: Value, index: Index, condition: str = "") -> str | None:
        """The element as an item of a pack, where the kernel has packs and `value` allows it.

        Where the condition does not hold, the pack is not read and the item is 0.
        """
        packs, dtype = self.packs, value.type.dtype
        if packs is None or not (value.producer is None or value in self.stored):
            return None
        if all(i in packs.outer or i.isdigit() for i in index):
            return None
        found = packs.place(self, value, index)
        if found is None or self.depth != packs.depth:
            packs.strided = True
            return None
        k, place = found
        key = value, ("pack", place, condition)
        name = self._find(key)
        if name is None:
            kind = f"Pack<{dtype}, {packs.size // (2 if dtype in FOUR_BITS else 1)}>"
            load = f"((const {kind}*){self.pointer(value)})[{place}]"
            name = self._known[-1][key] = self.variable(kind, "{}" if condition else load)
            if condition:
                self.line(f"if ({condition}) {name} = {load};")
            packs.count(value)
        if dtype in FOUR_BITS:
            return f"{dtype}::decoded({name}.item[{k // 2}].pair >> {k % 2 * 4} & 15)"
        return f"({REGISTERS[dtype][0]}){name}.item[{k}]"

    def store(self, number: int, value: Value, index: Index, text: str, place: str = "") -> None:
        """Write the element at `index` of output `number`, which is `value`, at once or in a pack.

        `place`: the number of the element, or of its pack, in the output, where it is known.
        """
        dtype, packs = value.type.dtype, self.packs
        if packs is None:
            place = place or self.place(value, index)
            self.line(f"store<{dtype}>(out{number}, {place}, {text});")
            return
        found = packs.place(self, value, index)
        assert found is not None and dtype not in FOUR_BITS, f"no packs of {value.type}"
        kind = f"Pack<{dtype}, {packs.size}>"
        if found[0] == 0:
            packs.stored[number] = self.variable(kind, "{}")
        name = packs.stored[number]
        self.line(f"{name}.item[{found[0]}] = Memory<{dtype}>::of({text});")
        if found[0] == packs.size - 1:
            self.line(f"(({kind}*)out{number})[{place or found[1]}] = {name};")

    def _computed(self, value: Value, index: Index) -> str:
        op = value.producer
        assert op is not None
        make = ELEMENTS.get(type(op))
        if make is None:
            raise Error(f"{op.opname} has no elements; its results must be stored")
        return make(self, op, op.results.index(value), index)

    def pointer(self, value: Value) -> str:
        """The name of the argument that points to a stored value."""
        return self.pointers.setdefault(value, f"p{len(self.pointers)}")

    def place(self, value: Value, index: Sequence[str]) -> str:
        """The number of an element in row-major order."""
        return self.flattened(index, value.type.shape)

    def flattened(self, index: Sequence[str], shape: Shape) -> str:
        """The number of the element at `index` of a shape in row-major order."""
        index = _without_ones(tuple(index), shape)
        known = self.known_number(index, shape)
        if known is not None:
            return known
        found = ""
        for i, size in zip(index, shape, strict=True):
            found = i if found in ("", "0") else f"({found}) * {self.size(size)} + {i}"
        return found or "0"

    def unflattened(self, number: str, shape: Sequence[DimLike]) -> Index:
        """The index of an element by its number in row-major order."""
        index: list[str] = []
        left = number
        for size in reversed(tuple(shape)[1:]):
            if size == 1:
                index.append("0")
                continue
            index.append(self.variable("ix", f"{left} % {self.size(size)}"))
            left = self.variable("ix", f"{left} / {self.size(size)}")
        if shape:
            index.append("0" if shape[0] == 1 else left)
        found = tuple(reversed(index))
        self.remember(found, tuple(shape), number)
        return found

    def remember(self, index: Index, shape: Shape, number: str) -> None:
        """The element at `index` of values of this shape is known to have this number."""
        self._known[-1][shape, _without_ones(index, shape)] = number

    def known_number(self, index: Index, shape: Shape) -> str | None:
        """The number of an element in row-major order, where a variable has it."""
        return self._find((shape, _without_ones(index, shape)))

    def size(self, size: DimLike) -> str:
        """A size in C; its symbols become arguments of the kernel, called `size_B` and so on."""
        if isinstance(size, int):
            return str(size)
        names = {name: symbol(f"size_{name}") for name in size.symbols()}
        self.symbols |= dict.fromkeys(names)
        return f"({size.bind(names)})"

    def variable(self, kind: str, text: str, items: int = 0) -> str:
        """A new variable, or array of `items`; its name."""
        self._count += 1
        name = f"v{self._count}"
        self.line(f"{kind} {name}{f'[{items}]' if items else ''} = {text};")
        return name

    def line(self, text: str) -> None:
        """One statement."""
        self.lines.append("  " * len(self._known) + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """Statements behind `head`, such as a loop or a condition, in a scope of their own."""
        self.line(f"{head} {{")
        self._known.append({})
        try:
            yield
        finally:
            self._known.pop()
            self.line("}")

    @contextmanager
    def before_wait(self) -> Generator[None]:
        """Statements that all threads execute before they wait for the kernel in front."""
        lines, known = self.lines, self._known
        self.lines, self._known = self.early, known[:1]
        try:
            yield
        finally:
            self.lines, self._known = lines, known

    @property
    def depth(self) -> int:
        """How many blocks this statement is in, with the kernel."""
        return len(self._known)

    def table(self, kind: str, texts: Sequence[str]) -> str:
        """The name of an array of constants."""
        items = f"{{{', '.join(texts)}}}"
        make = lambda: self.variable(f"static const {kind}", items, len(texts))  # noqa: E731
        return self.once((kind, items), make)

    def once(self, key: object, make: Callable[[], str]) -> str:
        """What `make` gives, whose statements all threads of a block execute before all others."""
        if key not in self._once:
            lines, known = self.lines, self._known
            self.lines, self._known = self.first, [{}]
            self._once[key] = make()
            self.lines, self._known = lines, known
        return self._once[key]


def _moves(value: Value) -> bool:
    """Whether the elements of a computed value are elements of an operand."""
    op = value.producer
    assert op is not None
    return op.moves_data and any(v.type.dtype == value.type.dtype for v in op.operands)


def _without_ones(index: Index, shape: Shape) -> Index:
    return tuple("0" if size == 1 else i for i, size in zip(index, shape, strict=True))
