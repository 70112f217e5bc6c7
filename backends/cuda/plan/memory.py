"""Where the values of a plan lie: which share memory, and what has to be copied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from irc.analysis.sizes import LocalSizes
from irc.ir.core import Function, Value, Weight
from irc.ir.types import TensorType

from .arena import Lifetime, place
from .core import PEERS, Argument, Buffer, Place
from .nodes import Node
from .storage import view_of
from .template import AnyTemplate

Copy: TypeAlias = tuple[str, str, TensorType]  # source, target and what is copied


class Memory:
    """The buffers of one plan, while its steps are made in order.

    A result that overwrites a state is computed in the memory of that state where nothing needs the
    old state any more; otherwise it is copied there at the end.
    """

    def __init__(
        self, function: Function, names: dict[Value, str], weights: dict[str, Weight]
    ) -> None:
        self.function, self.names, self.weights = function, names, weights
        self._types: dict[str, TensorType] = {}
        self._places: dict[str, Place] = {}
        self._zeros: dict[str, list[TensorType]] = {}
        self._lives: dict[str, tuple[int, int]] = {}
        self._home: dict[Value, str] = {}
        self._last_use: dict[Value, int] = {}
        self._copies: list[Copy] = []
        self._scratch: list[str] = []
        self._number = 0
        states = {function.args[at] for at in function.aliases().values()}
        for arg in function.args:
            self._home[arg] = self._buffer(
                names[arg], arg.type, "state" if arg in states else "input"
            )

    def use(self, nodes: Sequence[Node]) -> None:
        """Note the last node that uses each value; results are used after all nodes."""
        for number, node in enumerate(nodes):
            self._last_use |= dict.fromkeys(node.reads, number)
        for value in self.function.returned:
            self._last_use[view_of(value)] = len(nodes)

    def begin(self, number: int, template: AnyTemplate) -> None:
        """Give what a launch of a node writes its memory."""
        self._number = number
        for value in template.writes:
            if value in template.in_place:
                self._update(value, view_of(template.in_place[value]))
            elif value not in self._home:
                self._home[value] = self._fresh(value)
        self._scratch = self._extra(template.scratch, "arena")
        self._scratch += self._extra(template.zeros, "zeros")
        if template.peers:
            name = f"%peers.{template.peers}"
            self._types[name], self._places[name] = TensorType("u8", (PEERS,)), "peers"
            self._scratch.append(name)

    def arguments(self, template: AnyTemplate) -> tuple[Argument, ...]:
        """The pointers of a launch."""
        reads = [Argument(self.home(value)) for value in template.reads]
        writes = [Argument(self.home(value), written=True) for value in template.writes]
        return (*reads, *writes, *(Argument(name, written=True) for name in self._scratch))

    def copies(self) -> list[Copy]:
        """The copies that come first; they are handed out once."""
        copies, self._copies = self._copies, []
        return copies

    def home(self, value: Value) -> str:
        """The buffer of a value, or of what it is a view of."""
        value = view_of(value)
        if isinstance(value, Weight) and value not in self._home:
            name = f"@{value.name}"
            self.weights[name] = value
            self._home[value] = self._buffer(name, value.type, "weight")
        return self._home[value]

    def results(self) -> list[str]:
        """The buffers of the results; `copies` then has what brings values there."""
        function, buffers = self.function, list[str]()
        aliases, moved = function.aliases(), list[tuple[str, str, TensorType]]()
        for i, value in enumerate(function.returned):
            source = self.home(value)
            if i in aliases:
                target = self._home[function.args[aliases[i]]]
            elif self._places[source] == "output" and source not in buffers:
                target = source
            else:
                target = self._buffer(self._result_name(i), value.type, "output")
            buffers.append(target)
            if source != target:
                moved.append((source, target, value.type))
        moved.sort(key=lambda each: self._places[each[1]] == "state")  # outputs first
        targets = {target for _, target, _ in moved}
        for number, (source, target, type) in enumerate(moved):
            if source in targets and self._places[target] == "state":
                kept = self._buffer(f"{source}:kept", type, "arena")
                self._copy(source, kept, type)
                moved[number] = kept, target, type
        for source, target, type in moved:
            self._copy(source, target, type)
        return buffers

    def keep(self, used: Collection[str], steps: Sequence[Sequence[Argument]]) -> None:
        """Forget buffers that nothing uses; `steps` are the pointers of all steps in order."""
        for name, where in list(self._places.items()):
            if name not in used and where not in ("input", "state", "output"):
                del self._types[name], self._places[name]
        for number, arguments in enumerate(steps):
            for argument in arguments:
                if self._places[argument.buffer] == "arena":
                    first, _ = self._lives.get(argument.buffer, (number, number))
                    self._lives[argument.buffer] = first, number

    def buffers(self, sizes: LocalSizes) -> dict[str, Buffer]:
        """The buffers at some sizes, those of the arena with their offsets."""
        lives = {
            name: Lifetime(*ends, sizes.bytes(self._types[name]))
            for name, ends in self._lives.items()
        }
        offsets = place(lives)
        buffers: dict[str, Buffer] = {}
        for name, type in self._types.items():
            where, kind, shape = self._places[name], type.dtype, sizes.shape(type)
            if where == "zeros":
                kind, shape = "u8", (max(map(sizes.bytes, self._zeros[name])),)
            buffers[name] = Buffer(name, kind, shape, where, offsets.get(name, 0))
        return buffers

    def _fresh(self, value: Value) -> str:
        """New memory for a value, or that of the result or state that it becomes."""
        aliases = self.function.aliases()
        for i, returned in enumerate(self.function.returned):
            if view_of(returned) is not value:
                continue
            if i not in aliases:
                return self._buffer(self._result_name(i), returned.type, "output")
            state = self._home[self.function.args[aliases[i]]]
            if self._is_free(state):
                return state
        return self._buffer(self.names.get(value) or "%_", value.type, "arena")

    def _is_free(self, buffer: str) -> bool:
        """Whether neither this node nor a later one uses what lies in a buffer."""
        return all(
            self._last_use.get(value, -1) < self._number
            for value, home in self._home.items()
            if home == buffer
        )

    def _update(self, value: Value, old: Value) -> None:
        """Let a value lie in the memory of the old one, or in a copy where that is needed."""
        source = self.home(old)
        needed = self._last_use.get(old, -1) > self._number
        if not needed and self._places[source] not in ("input", "weight"):
            self._home[value] = source
            return
        self._home[value] = self._fresh(value)
        self._copy(source, self._home[value], value.type)

    def _copy(self, source: str, target: str, type: TensorType) -> None:
        self._copies.append((source, target, type))

    def _extra(self, types: Sequence[TensorType], where: Place) -> list[str]:
        """Memory of one launch besides its values; what has to be zero is shared by all."""
        if where == "arena":
            return [self._buffer("%scratch", type, where) for type in types]
        names = [f"%zeros{i}" for i in range(len(types))]
        for name, type in zip(names, types, strict=True):
            self._types[name], self._places[name] = type, "zeros"
            self._zeros.setdefault(name, []).append(type)
        return names

    def _buffer(self, name: str, type: TensorType, where: Place) -> str:
        """A new buffer; its name, with a number where another one has that name."""
        number, wanted = 0, name
        while name in self._types:
            number += 1
            name = f"{wanted}:{number}"
        self._types[name], self._places[name] = type, where
        return name

    def _result_name(self, number: int) -> str:
        return f"result.{self.function.result_names()[number]}"
