"""Steps whose inputs come from the step before on the device; their results are read a step late.

A kernel behind each step, in the same CUDA graph, copies results to the inputs that take them and
to host memory, and advances positions: so the GPU need not wait for the host between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from irc.backends.base import Arrays, Port, Ports
from irc.backends.cuda.driver import Array, Event
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.execute.memory import DeviceArray, host_like, size_of
from irc.backends.cuda.plan import Argument, Kernel, Launch
from irc.backends.ranks.ports import Sizes, sized

if TYPE_CHECKING:
    from irc.backends.cuda.execute.program import GpuProgram
    from irc.backends.cuda.execute.rank import CudaRank
    from irc.backends.cuda.execute.stream import RankStream

_SLOTS = 2  # of host memory, which steps fill in turn
_BLOCK = 256
_WORD = 4  # bytes


@dataclass(frozen=True)
class Copy:
    """`words` of 32 bits, to each of which `plus` is added, are copied to `target`: in step n to
    the word n % 2 * `stride` behind it."""

    source: int
    target: int
    words: int
    stride: int = 0
    plus: int = 0


@dataclass(frozen=True)
class Feed:
    """What follows each step. `steps`: the address of the number of steps so far, i32."""

    steps: int
    copies: tuple[Copy, ...]

    def bound(self, kernels: Kernels, early: bool) -> Enqueue:
        """What enqueues it; `early` as of Kernels."""
        kernel = _kernel(len(self.copies))
        kernels.load([kernel])
        addresses = [self.steps, *(a for copy in self.copies for a in (copy.source, copy.target))]
        numbers = [n for copy in self.copies for n in (copy.words, copy.stride, copy.plus)]
        pointers = [Argument("", written=True)] * len(addresses)
        launch = Launch(kernel.name, (1, 1, 1), _BLOCK, (*pointers, *numbers))
        return kernels.bind(launch, kernel, [*addresses, *numbers], early)


@cache
def _kernel(copies: int) -> Kernel:
    """The kernel of one block for so many copies."""
    pointers = "".join(f", const int* from{i}, int* to{i}" for i in range(copies))
    numbers = "".join(f", int words{i}, int stride{i}, int plus{i}" for i in range(copies))
    lines = "".join(
        f"    for (int i = threadIdx.x; i < words{i}; i += blockDim.x)\n"
        f"        to{i}[slot * stride{i} + i] = from{i}[i] + plus{i};\n"
        for i in range(copies)
    )
    return Kernel(
        "feed",
        f"""
extern "C" __global__ void feed(int* steps{pointers}{numbers}) {{
    wait_for_previous();
    const int slot = *steps & 1;
{lines}    __syncthreads();  // all threads have read the number
    if (threadIdx.x == 0) *steps += 1;
}}
""",
    )


class FeedbackLoop:
    """Steps of one conversation. `fed`: the result that each fed input takes; `advanced`: inputs
    that grow by one per step. Other inputs stay. `owner` closes the stream once nobody holds it."""

    def __init__(
        self,
        program: GpuProgram[CudaRank],
        stream: RankStream,
        fed: Mapping[str, str],
        advanced: Sequence[str],
        owner: object,
    ) -> None:
        self._program, self._stream, self._rank = program, stream, program.rank
        self._owner = owner
        self._fed, self._advanced = fed, advanced
        self._names = [port.name for port in program.ports.outputs]
        self._hosts: dict[str, Array] = {}

    def outputs(self, shards: Mapping[str, Array], sizes: Sizes, count: int) -> Iterator[Arrays]:
        """The outputs of `count` steps, of which the first takes `shards`.

        Where the caller stops before the end, one more step has run than it has seen.
        """
        rank, stream = self._rank, self._stream
        shards = {name: np.array(array) for name, array in shards.items()}  # no constants
        steps = rank.shared.device("steps", _WORD)
        rank.driver.zero(steps, _WORD, rank.stream.handle)

        def feed(inputs: Mapping[str, DeviceArray], results: Mapping[str, DeviceArray]) -> Feed:
            return Feed(steps, tuple(self._copies(inputs, results)))

        # Broadcasts wait for the last stage of a pipeline, so a graph of the first has none.
        inside = all(map(self._program.is_local, self._names))
        results, full = stream.step(shards, sizes, feed=feed if inside else None)
        behind: list[Enqueue] = []
        if not inside:
            results, behind = self._sent(results, full)
            behind.append(feed(stream.inputs, results).bound(rank.kernels, False))
        done = self._event(behind)
        for number in range(count):
            before = done
            if number < count - 1:
                stream.again()
                done = self._event(behind)
            self._program.wait(before)
            yield self._read(number, sizes, full)

    def _event(self, behind: Sequence[Enqueue]) -> Event:
        """The end of a step, behind which something is enqueued."""
        for enqueue in behind:
            enqueue(self._rank.stream.handle)
        return self._rank.stream.event()

    def _copies(
        self, inputs: Mapping[str, DeviceArray], results: Mapping[str, DeviceArray]
    ) -> Iterator[Copy]:
        for name, result in self._fed.items():
            if name in inputs:
                yield Copy(results[result].address, inputs[name].address, _words(inputs[name]))
        for name in self._advanced:
            if name in inputs:
                address = inputs[name].address
                yield Copy(address, address, _words(inputs[name]), plus=1)
        for name in self._names:
            words = _words(results[name])
            host = self._rank.shared.host(f"fed {name}", (_SLOTS, words), np.int32)
            self._hosts[name] = host
            yield Copy(results[name].address, host.ctypes.data, words, stride=words)

    def _sent(
        self, results: Mapping[str, DeviceArray], full: Sizes
    ) -> tuple[dict[str, DeviceArray], list[Enqueue]]:
        """The results on all ranks, and what sends them from the first that computes them."""
        sharding, everywhere, sends = self._program.sharding, dict(results), list[Enqueue]()
        for name in self._names:
            result = sharding.results[name]
            shape, dtype = sized(result.port.shape, full), result.port.dtype
            if name not in results:
                address = self._rank.shared.device(f"result {name}", size_of(shape, dtype))
                everywhere[name] = DeviceArray(address, shape, dtype)
            at, root = everywhere[name], sharding.ranks_with(result)[0]
            broadcast = self._program.broadcast(at.size, root)
            sends.append(partial(broadcast, at.address, at.address))
        return everywhere, sends

    def _read(self, number: int, sizes: Sizes, full: Sizes) -> Arrays:
        """The outputs of a step that is done."""
        sharding, hosts = self._program.sharding, dict[str, Mapping[int, Array]]()
        for name, host in self._hosts.items():
            result = sharding.results[name]
            shape, dtype = host_like(sized(result.port.shape, full), result.port.dtype)
            words = host[number % _SLOTS].view(dtype)[: prod(shape)].reshape(shape)
            hosts[name] = {min(sharding.ranks_with(result)): words}
        return self._program.joined(hosts, sizes, full)


def _words(array: DeviceArray) -> int:
    return -(-array.size // _WORD)


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
