"""An engine under one profile: shapes and addresses set when they change, repeats as graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from irc.backends.cuda.driver import Stream
from irc.backends.cuda.execute.memory import Memory
from irc.backends.ranks.communicator import PeerError
from irc.backends.tensorrt.plugins import take_failure
from irc.backends.tensorrt.runtime.engine import Engine, Shape
from irc.backends.tensorrt.runtime.gpu import EngineGpu
from irc.errors import Error

Warn: TypeAlias = Callable[[str], None]
_Shapes: TypeAlias = tuple[tuple[str, Shape], ...]
_Key: TypeAlias = tuple[_Shapes, tuple[tuple[str, int], ...]]


class Execution:
    """One context, and memory of its own that stays in place while other profiles run.

    `graphs`: run what repeats as a CUDA graph.
    """

    def __init__(
        self, gpu: EngineGpu, engine: Engine, profile: int, stream: Stream, graphs: bool, warn: Warn
    ) -> None:
        self._gpu, self._engine, self._stream = gpu, engine, stream
        self._graphs, self._warn = graphs, warn
        self._context = engine.context(profile, stream)
        self.memory = Memory(gpu.driver, stream)
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._last: _Key | None = None
        self._captured: tuple[_Key, Any] | None = None
        self._seen: set[_Shapes] = set()

    def is_new(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether shapes run for the first time: the library may compile kernels for them."""
        key = tuple(shapes.items())
        new = key not in self._seen
        self._seen.add(key)
        return new

    def run(
        self,
        shapes: Mapping[str, Shape],
        addresses: Mapping[str, int],
        results: Mapping[str, Shape],
    ) -> None:
        """Enqueue a run.

        `shapes` are those of inputs with dynamic shapes, `addresses` those of all tensors, and
        `results` the shapes that the outputs must have. The library chooses its kernels in the
        first run of shapes and addresses; the second one in a row is captured, and launched later.
        """
        key = (tuple(shapes.items()), tuple(addresses.items()))
        if self._captured is not None:
            if self._captured[0] == key:
                self._stream.launch(self._captured[1])
                return
            self.forget()
        repeated = key == self._last
        self._set(shapes, addresses)
        if not repeated:
            self._check_results(results)
            self._last = key
        if not (self._graphs and repeated and self._capture(key)):
            self._enqueue()

    def _enqueue(self) -> None:
        """It may take long: the library may compile kernels for new shapes."""
        engine = self._engine
        with self._gpu.during("the step", math.inf):
            if not self._context.execute_async_v3(self._stream.handle):
                raise engine.error(f"{engine.library} could not run {engine.path}")
        if failure := take_failure():
            raise engine.error(f"a plugin failed in {engine.path}", failure)

    def _check_results(self, results: Mapping[str, Shape]) -> None:
        for name, shape in results.items():
            found = tuple(int(n) for n in self._context.get_tensor_shape(name))
            if found != shape:
                raise Error(
                    f"expected {name} with shape {list(shape)} as in the manifest, found "
                    f"{list(found)} in the engine; they are of different compilations: "
                    "compile again"
                )

    def _capture(self, key: _Key) -> bool:
        reason = "the engine says that this work cannot be captured"
        capturable = getattr(self._context, "is_stream_capturable", lambda stream: True)
        if capturable(self._stream.handle):
            try:
                graph = self._stream.capture(self._enqueue)
                self._captured = key, graph
                self._stream.launch(graph)
                return True
            except PeerError:
                raise
            except Error as error:
                reason = str(error)
        self._graphs = False
        self._warn(f"steps run without a CUDA graph, which takes longer: {reason}")
        return False

    def _set(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) == shape:
                continue
            if not self._context.set_input_shape(name, shape):
                raise Error(
                    f"the engine refuses the shape {list(shape)} of its input {name}, which the "
                    "manifest allows; they are of different compilations: compile again"
                )
            self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                if not self._context.set_tensor_address(name, address):
                    raise Error(f"{self._engine.library} refuses an address for {name}")
                self._addresses[name] = address

    def forget(self) -> None:
        """Drop the graph; one that runs still ends."""
        if self._captured is not None:
            self._stream.drop(self._captured[1])
        self._captured = self._last = None

    def free(self) -> None:
        """Free memory and graph; no run follows."""
        self.forget()
        self.memory.free()
