"""Times of the kernels that plans may choose among, for `irc bench kernels`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from irc.analysis.sizes import LocalSizes
from irc.analysis.stages import stages_of
from irc.artifact.manifest import Progress
from irc.backends.cuda.device import CudaStream
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.execute.load import CudaGpu, open_gpu
from irc.backends.cuda.execute.timing import COLD, Timing
from irc.backends.cuda.facts import sizes_of
from irc.backends.cuda.group import TIMEOUT
from irc.backends.cuda.plan import Argument, Template, Tuning
from irc.backends.cuda.plan.arena import aligned
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.tuning import fastest
from irc.errors import Error
from irc.ir.core import Module, Value

_CALLS = 40  # of a graph, at least
_MOST = 64  # copies of the operands


@dataclass(frozen=True)
class Site:
    """A launch at some sizes that several kernels could compute."""

    tuning: Tuning
    local: LocalSizes
    symbols: Mapping[str, int]


@dataclass(frozen=True)
class Timed:
    """Microseconds by choice, that of the rules first, and the least that memory allows."""

    key: str
    us: Mapping[str, float]
    floor_us: float

    @property
    def choice(self) -> str:
        """The fastest."""
        return fastest(self.us)


def sites_of(module: Module, dims: Mapping[str, int]) -> dict[str, Site]:
    """What can be chosen in the plans of a module by key: at these sizes, the others typical, or
    without any at typical and at least sizes."""
    found: dict[str, Site] = {}
    for stage in stages_of(module):
        planner = Planner(module, stage.function.name, stage.ranks[0])
        known = sizes_of(module, stage.function)
        for sizes in [known["typical"] | {**dims}] if dims else known.values():
            local = LocalSizes(planner.module.mesh, sizes)
            for node in planner.launches(sizes).nodes:
                for tuning in (each.tuning for each in node.templates):
                    if tuning is not None:
                        found[tuning.key] = Site(tuning, local, sizes | planner.positions())
    return found


def time_kernels(
    modules: Iterable[Module], dims: Mapping[str, int], tell: Progress
) -> tuple[str, list[Timed]]:
    """The GPU of this process, and the times of all kernels that the modules' plans could choose;
    `dims` as of sites_of."""
    gpu = open_gpu(0, TIMEOUT)
    sites = {key: site for each in modules for key, site in sites_of(each, dims).items()}
    times = KernelTimes(gpu, Timing(gpu.driver, CudaStream()))
    return str(gpu.driver.gpu), list(times(list(sites.values()), tell))


class KernelTimes:
    """Times kernels in chains, over more memory than any cache holds."""

    def __init__(self, gpu: CudaGpu, timing: Timing) -> None:
        self._gpu, self._timing = gpu, timing

    def __call__(self, sites: Sequence[Site], tell: Progress) -> Iterator[Timed]:
        """The times of all kernels that could be chosen."""
        rate = self._timing.read_rate(self._gpu.kernels)
        for number, site in enumerate(sites):
            tell(f"timing {site.tuning.key}", number / len(sites))
            variants = site.tuning.variants()
            self._gpu.kernels.load(each.kernel for each in variants.values())
            us = {name: self._us(site, each) for name, each in variants.items()}
            first = next(iter(variants.values()))
            values = {*first.reads, *first.writes}.difference(first.in_place)
            nbytes = sum(site.local.bytes(value.type) for value in values)
            yield Timed(site.tuning.key, us, nbytes / rate)

    def _us(self, site: Site, template: Template) -> float:
        """The microseconds of a launch; infinite where it cannot run."""
        offsets, size = _offsets(site, template)
        copies = max(2, min(_MOST, -(-COLD // size)))
        with self._timing.memory([copies * size]) as memory:
            if not memory:
                raise Error(f"{site.tuning.key}: too little memory is free; stop other programs")
            places = [[memory[0] + i * size + at for at in offsets] for i in range(copies)]
            for each in places:
                self._prepare(site, template, each)
            first = self._bound(site, template, places[0], early=False)
            calls = [self._bound(site, template, each, template.waits) for each in places]
            return self._timing.us([first, *islice(cycle(calls), max(_CALLS, copies))])

    def _prepare(self, site: Site, template: Template, addresses: Sequence[int]) -> None:
        """Set integers that are read, such as positions, and memory that starts with zeros."""
        stream = self._timing.stream
        for value, address in zip(template.reads, addresses, strict=False):
            if value.type.dtype in ("i32", "i64"):
                kind = value.type.dtype.replace("i", "int")
                stream.upload(
                    address, np.full(site.local.count(value.type), site.tuning.index, kind)
                )
                stream.wait("positions")
        for kind, address in zip(template.zeros[::-1], addresses[::-1], strict=False):
            self._gpu.driver.zero(address, site.local.bytes(kind), stream.handle)

    def _bound(
        self, site: Site, template: Template, addresses: Sequence[int], early: bool
    ) -> Enqueue:
        pointers = [Argument("") for _ in addresses]
        launch = template.launch(template.kernel.name, pointers, site.symbols)
        values = [*addresses, *(site.symbols[name] for name in template.symbols)]
        return self._gpu.kernels.bind(launch, template.kernel, values, early)


def _offsets(site: Site, template: Template) -> tuple[list[int], int]:
    """Where the pointers of a launch lie in memory of its own, and the bytes of that."""
    found: dict[object, int] = {}
    size = 0
    values = dict.fromkeys((*template.reads, *template.writes))
    parts = [*((v, v.type) for v in values), *enumerate((*template.scratch, *template.zeros))]
    for key, kind in parts:
        old = template.in_place.get(key) if isinstance(key, Value) else None
        found[key] = found.get(old, size)
        if found[key] == size:
            size += aligned(max(site.local.bytes(kind), 1))
    rest = range(len(parts) - len(values))
    return [found[key] for key in (*template.reads, *template.writes, *rest)], size
