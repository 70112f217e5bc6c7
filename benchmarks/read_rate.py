"""How fast a plain kernel reads device memory: the floor of steps that read weights."""

from __future__ import annotations

import itertools
from statistics import median

from irc.backends.cuda.driver import Driver, Event, Stream
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.plan import Argument, Kernel, Launch

SIZE = 4 << 30  # bytes that are read
_SOURCE = """
extern "C" __global__ void __launch_bounds__(256) read_all(const uint4 *x, uint4 *found, int n) {
  // n: how often all threads together take UNROLL vectors
  const long long threads = (long long)gridDim.x * blockDim.x;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  uint4 sum = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) {
    uint4 part[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++, at += threads) part[u] = __ldcs(x + at);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      sum.x ^= part[u].x, sum.y ^= part[u].y, sum.z ^= part[u].z, sum.w ^= part[u].w;
    }
  }
  if (sum.x == 0x9e3779b9 && sum.y == 1) *found = sum;  // so that nothing is left out
}
"""
_LAUNCHES = 20


def read_rate(driver: Driver, stream: Stream, kernels: Kernels) -> float:
    """Bytes per second of the fastest of some grids, each by the median of its launches."""
    address = driver.allocate(SIZE)
    driver.zero(address, SIZE, stream.handle)
    grids = [(unroll, blocks) for unroll in (4, 8) for blocks in (1 << 10, 1 << 12, 1 << 14)]
    rates = [_rate(stream, kernels, address, unroll, blocks) for unroll, blocks in grids]
    driver.free(address)
    return max(rates)


def _rate(stream: Stream, kernels: Kernels, address: int, unroll: int, blocks: int) -> float:
    kernel = Kernel("read_all", _SOURCE, {"UNROLL": str(unroll)})
    repeats = SIZE // (16 * 256 * blocks * unroll)
    read = Argument("x")
    launch = Launch("read_all", (blocks, 1, 1), 256, (read, read, repeats))
    kernels.load([kernel])
    run = kernels.bind(launch, kernel, [address, address, repeats], early=False)
    run(stream.handle)
    events: list[Event] = [stream.event()]
    for _ in range(_LAUNCHES):
        run(stream.handle)
        events.append(stream.event())
    stream.wait()
    times = [a.ms_until(b) for a, b in itertools.pairwise(events)]
    return SIZE / median(times) * 1e3
