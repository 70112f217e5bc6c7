"""Steps whose inputs come from the step before on the device; their results are read a step late.

So the GPU need not wait for the host between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from irc.backends.base import Arrays, Port, Ports
from irc.backends.cuda.driver import Array, Event
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.execute.memory import DeviceArray
from irc.backends.cuda.execute.program import GpuProgram, Staged
from irc.backends.cuda.execute.rank import CudaRank
from irc.backends.cuda.execute.stream import RankStream
from irc.backends.cuda.plan import Argument, Kernel, Launch
from irc.backends.ranks.ports import Sizes, sized

_BLOCK = 256
_ADD_ONE = Kernel(
    "add_one",
    """
extern "C" __global__ void add_one(i32* x, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    store<i32>(x, i, load<i32>(x, i) + 1);
}
""",
)


class Ahead:
    """Steps of one conversation. `fed`: the result that each fed input takes; `advanced`: inputs
    that grow by one per step. Other inputs stay."""

    def __init__(
        self,
        program: GpuProgram[CudaRank],
        stream: RankStream,
        fed: Mapping[str, str],
        advanced: Sequence[str],
    ) -> None:
        self._program, self._stream, self._rank = program, stream, program.rank
        self._fed, self._advanced = fed, advanced
        self._names = [port.name for port in program.ports.outputs]

    def outputs(self, shards: Mapping[str, Array], sizes: Sizes, count: int) -> Iterator[Arrays]:
        """The outputs of `count` steps, of which the first takes `shards`.

        Where the caller stops before the end, one more step has run than it has seen.
        """
        found, full = self._stream.step(shards, sizes)
        updates = self._updates()
        turn, (staged, event) = 0, self._staged(found, full, 0)
        for _ in range(count - 1):
            self._feed(found, staged)
            for update in updates:
                update(self._rank.stream.handle)
            found = self._stream.again()
            turn = 1 - turn
            before, done = staged, event
            staged, event = self._staged(found, full, turn)
            yield self._read(before, done, sizes, full)
        yield self._read(staged, event, sizes, full)

    def _staged(
        self, found: Mapping[str, DeviceArray], full: Sizes, turn: int
    ) -> tuple[dict[str, Staged], Event]:
        staged = {
            name: self._program.staged(name, found, full, f"{name}, {turn}") for name in self._names
        }
        return staged, self._rank.stream.event()

    def _read(self, staged: Mapping[str, Staged], done: Event, sizes: Sizes, full: Sizes) -> Arrays:
        done.wait()
        return self._program.joined(staged, sizes, full)

    def _feed(self, found: Mapping[str, DeviceArray], staged: Mapping[str, Staged]) -> None:
        """Copy results to the inputs that take them: those of the rank that all ranks use."""
        for name, result in self._fed.items():
            value = self._stream.inputs.get(name)
            if value is not None:
                (source,) = staged[result].addresses
                self._rank.stream.copy(value.address, source, value.size)

    def _updates(self) -> list[Enqueue]:
        self._rank.kernels.load([_ADD_ONE])
        return [
            self._add_one(self._stream.inputs[name])
            for name in self._advanced
            if name in self._stream.inputs
        ]

    def _add_one(self, value: DeviceArray) -> Enqueue:
        count = prod(value.shape)
        grid = (max(1, min(1024, -(-count // _BLOCK))), 1, 1)
        launch = Launch("add_one", grid, _BLOCK, (Argument("x", written=True), count))
        return self._rank.kernels.bind(launch, _ADD_ONE, [value.address, count], False)


def can_follow(ports: Ports, sizes: Sizes, fed: Mapping[str, str], advanced: Sequence[str]) -> bool:
    """Whether the results fit the inputs that take them at these sizes, and the others are i32."""
    inputs = {port.name: port for port in ports.inputs}
    outputs = {port.name: port for port in ports.outputs}
    return all(name in inputs and inputs[name].dtype == "i32" for name in advanced) and all(
        result in outputs and _kind(inputs[name], sizes) == _kind(outputs[result], sizes)
        for name, result in fed.items()
    )


def _kind(port: Port, sizes: Sizes) -> tuple[str, tuple[int, ...]]:
    return port.dtype, sized(port.shape, sizes)
