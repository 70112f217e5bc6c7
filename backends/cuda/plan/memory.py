"""Where the values of a plan lie: which share memory, and what has to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from irc.analysis.sizes import LocalSizes
from irc.ir.core import Function, Value, Weight
from irc.ir.types import TensorType

from .arena import Lifetime, place
from .core import PEERS, Argument, Buffer, LibraryCall, Place, Step, pointers
from .nodes import Node
from .storage import view_of
from .template import AnyTemplate


class Memory:
    """The buffers of one plan, while its steps are made in order.

    A result that overwrites a state is computed in the memory of that state where nothing needs the
    old state any more; otherwise it is copied there at the end.
    """

    def __init__(
        self,
        function: Function,
        names: dict[Value, str],
        sizes: LocalSizes,
        weights: dict[str, Weight],
    ) -> None:
        self.function, self.names, self.sizes, self.weights = function, names, sizes, weights
        self.buffers: dict[str, Buffer] = {}
        self._home: dict[Value, str] = {}
        self._last_use: dict[Value, int] = {}
        self._copies: list[Step] = []
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
            self.buffers[name] = Buffer(name, "u8", (PEERS,), "peers")
            self._scratch.append(name)

    def arguments(self, template: AnyTemplate) -> tuple[Argument, ...]:
        """The pointers of a launch."""
        reads = [Argument(self.home(value)) for value in template.reads]
        writes = [Argument(self.home(value), written=True) for value in template.writes]
        return (*reads, *writes, *(Argument(name, written=True) for name in self._scratch))

    def copies(self) -> list[Step]:
        """The copies that come first; they are handed out once."""
        found, self._copies = self._copies, []
        return found

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
        function, found = self.function, list[str]()
        aliases, moved = function.aliases(), list[tuple[str, str, TensorType]]()
        for i, value in enumerate(function.returned):
            source = self.home(value)
            if i in aliases:
                target = self._home[function.args[aliases[i]]]
            elif self.buffers[source].place == "output" and source not in found:
                target = source
            else:
                target = self._buffer(self._result_name(i), value.type, "output")
            found.append(target)
            if source != target:
                moved.append((source, target, value.type))
        moved.sort(key=lambda each: self.buffers[each[1]].place == "state")  # outputs first
        targets = {target for _, target, _ in moved}
        for number, (source, target, type) in enumerate(moved):
            if source in targets and self.buffers[target].place == "state":
                kept = self._buffer(f"{source}:kept", type, "arena")
                self._copy(source, kept, type)
                moved[number] = kept, target, type
        for source, target, type in moved:
            self._copy(source, target, type)
        return found

    def placed(self, steps: Sequence[Step]) -> dict[str, Buffer]:
        """The buffers, those of the arena with their offsets."""
        lives: dict[str, Lifetime] = {}
        for number, step in enumerate(steps):
            for each in pointers(step):
                if self.buffers[each.buffer].place == "arena":
                    life = lives.get(each.buffer)
                    first = number if life is None else life.first
                    size = self.buffers[each.buffer].nbytes
                    lives[each.buffer] = Lifetime(first, number, size)
        offsets = place(lives)
        return {
            name: replace(buffer, offset=offsets.get(name, 0))
            for name, buffer in self.buffers.items()
        }

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
        if not needed and self.buffers[source].place not in ("input", "weight"):
            self._home[value] = source
            return
        self._home[value] = self._fresh(value)
        self._copy(source, self._home[value], value.type)

    def _copy(self, source: str, target: str, type: TensorType) -> None:
        nbytes = self.sizes.bytes(type)
        if nbytes:
            ends = Argument(source), Argument(target, written=True)
            settings = {"nbytes": nbytes}
            self._copies.append(LibraryCall("memory", "copy", ends, settings, nbytes=2 * nbytes))

    def _extra(self, types: Sequence[TensorType], where: Place) -> list[str]:
        """Memory of one launch besides its values; what has to be zero is shared by all."""
        if where == "arena":
            return [self._buffer("%scratch", type, where) for type in types]
        found: list[str] = []
        for i, type in enumerate(types):
            name = f"%zeros{i}"
            known = self.buffers.get(name)
            nbytes = self.sizes.bytes(type)
            if known is None or known.nbytes < nbytes:
                self.buffers[name] = Buffer(name, "u8", (nbytes,), "zeros")
            found.append(name)
        return found

    def _buffer(self, name: str, type: TensorType, where: Place) -> str:
        """A new buffer; its name, with a number where another one has that name."""
        number, known = 0, name
        while name in self.buffers:
            number += 1
            name = f"{known}:{number}"
        self.buffers[name] = Buffer(name, type.dtype, self.sizes.shape(type), where)
        return name

    def _result_name(self, number: int) -> str:
        return f"result.{self.function.result_names()[number]}"
