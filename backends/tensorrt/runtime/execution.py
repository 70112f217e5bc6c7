"""An engine under one profile: addresses and shapes set when they change, repeated runs as a graph.

A context keeps the communicator that is bound to it for as long as it lives, and is never replaced:
with a new one the engine's collectives would silently do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from irc.backends.tensorrt.runtime.driver import Array, Driver, Engine, Group, Shape, Stream
from irc.errors import Error

Warn: TypeAlias = Callable[[str], None]
_Key: TypeAlias = tuple[tuple[tuple[str, Shape], ...], tuple[tuple[str, int], ...]]


class Memory:
    """Memory on the GPU and page-locked memory by name; either grows where more is needed.

    What a name had before is given up when it grows, so nothing may be under way then.
    """

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver, self._stream = driver, stream
        self._device: dict[str, tuple[int, int]] = {}
        self._host: dict[str, Array] = {}

    def device(self, name: str, size: int) -> int:
        """The address of at least so many bytes."""
        address, room = self._device.get(name, (0, 0))
        if room < size or not address:
            if address:
                self._stream.wait()
                del self._device[name]
                self._driver.free(address)
            address = self._driver.allocate(max(size, 1))
            self._device[name] = address, size
        return address

    def host(self, name: str, shape: Shape, dtype: Any) -> Array:
        """A page-locked array."""
        kind = np.dtype(dtype)
        size = kind.itemsize
        for dim in shape:
            size *= dim
        if name not in self._host or self._host[name].size < size:
            self._stream.wait()
            self._host[name] = self._driver.pinned(max(size, 1))
        return self._host[name][:size].view(kind).reshape(shape)

    def upload(self, name: str, array: Array) -> int:
        """Copy an array to the GPU through page-locked memory; its address."""
        staged = self.host(name, array.shape, array.dtype)
        staged[...] = array
        address = self.device(name, array.nbytes)
        self._stream.upload(address, staged)
        return address

    def free(self) -> None:
        """Give everything up."""
        for address, _ in self._device.values():
            self._driver.free(address)
        self._device.clear()
        self._host.clear()


class Execution:
    """One context.

    `memory` is this profile's own, so that what it binds stays where it is while others run.
    `graphs`: run what repeats as a CUDA graph.
    """

    def __init__(
        self,
        driver: Driver,
        engine: Engine,
        profile: int,
        stream: Stream,
        graphs: bool,
        warn: Warn,
    ) -> None:
        self._stream, self._warn = stream, warn
        self._context = engine.context(profile, stream)
        self._group: Group | None = None
        self.memory = Memory(driver, stream)
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._graphs = graphs
        self._last: _Key | None = None
        self._captured: tuple[_Key, Any] | None = None
        self._known: set[tuple[tuple[str, Shape], ...]] = set()

    def bind(self, group: Group) -> None:
        """Let the engine's own collectives use a group; all its ranks do so at once."""
        self._group = group  # it must outlive the context
        if not self._context.bind(group):
            raise Error(
                "the engine did not take the communicator of its ranks (set_communicator failed): "
                "its collectives would do nothing; compile with --collectives plugin"
            )

    def is_new(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether these shapes come for the first time: the library may compile kernels for them,
        which takes one rank longer than another."""
        key = tuple(shapes.items())
        new = key not in self._known
        self._known.add(key)
        return new

    def run(
        self,
        shapes: Mapping[str, Shape],
        addresses: Mapping[str, int],
        results: Mapping[str, Shape],
    ) -> None:
        """Enqueue a run; `shapes` of the inputs whose shapes vary, `addresses` of everything,
        `results` the shapes that there is memory for.

        The second of two runs with the same shapes and addresses is captured, and launched from
        then on: the first has the library choose its kernels.
        """
        key = (tuple(shapes.items()), tuple(addresses.items()))
        if self._captured is not None:
            if self._captured[0] == key:
                self._stream.launch(self._captured[1])
                return
            self.forget()
        self._set(shapes, addresses)
        for name, shape in results.items() if key != self._last else ():
            if (found := self._context.shape(name)) != shape:
                raise Error(
                    f"the engine gives {name} as {list(found)}, and the manifest says "
                    f"{list(shape)}; the two are of different compilations; compile again"
                )
        if not (self._graphs and key == self._last):
            self._last = key
            self._context.enqueue(self._stream)
            return
        if not self._capture(key):
            self._context.enqueue(self._stream)

    def _capture(self, key: _Key) -> bool:
        reason = "the engine says that this work cannot be captured"
        if self._context.capturable(self._stream):
            try:
                graph = self._stream.capture(lambda: self._context.enqueue(self._stream))
                self._captured = key, graph
                self._stream.launch(graph)
                return True
            except Error as error:
                reason = str(error)
        self._graphs = False
        self._warn(f"steps run without a CUDA graph, which takes longer: {reason}")
        return False

    def _set(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) == shape:
                continue
            if not self._context.set_shape(name, shape):
                raise Error(
                    f"the engine does not take the shape {list(shape)} of its input {name}, which "
                    "the manifest allows; the two are of different compilations; compile again"
                )
            self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                self._context.set_address(name, address)
                self._addresses[name] = address

    def forget(self) -> None:
        """Give up the graph; one that is under way still ends."""
        if self._captured is not None:
            self._stream.drop(self._captured[1])
        self._captured = self._last = None

    def free(self) -> None:
        """Give up memory and graph; no run follows."""
        self.forget()
        self.memory.free()
