"""Topologies: what a collective sends, against algorithms that count it; times, links, fits."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from irc.analysis.topology import KINDS, Line, Link, Protocol, sent, steps, traffic
from irc.analysis.topology_file import default_topology
from irc.analysis.topology_fit import Measurement, fit, worst_error
from irc.errors import Error
from irc.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    CollectiveGather,
    CollectiveScatter,
    Reduce,
    ReduceScatter,
)
from tests.fresh import fresh

Arrays = list[np.ndarray]


class Network:
    """Counts what ranks send and receive, and in how many rounds."""

    def __init__(self, ways: int) -> None:
        self.sent, self.received, self.rounds = [0] * ways, [0] * ways, 0

    def round(self, moves: Sequence[tuple[int, int, np.ndarray]]) -> Arrays:
        """Messages (from, to, array) that go at the same time; what arrives, in that order."""
        for source, target, array in moves:
            self.sent[source] += array.nbytes
            self.received[target] += array.nbytes
        self.rounds += 1
        return [array.copy() for _, _, array in moves]


def ring_reduce_scatter(net: Network, given: Arrays) -> Arrays:
    ways = len(given)
    parts = [np.split(array, ways) for array in given]
    for step in range(ways - 1):
        moves = [(r, (r + 1) % ways, parts[r][(r - step - 1) % ways]) for r in range(ways)]
        for (_, target, _), array in zip(moves, net.round(moves), strict=True):
            place = (target - step - 2) % ways
            parts[target][place] = parts[target][place] + array
    return [parts[r][r] for r in range(ways)]


def ring_all_gather(net: Network, given: Arrays) -> Arrays:
    ways = len(given)
    have: list[dict[int, np.ndarray]] = [{r: given[r]} for r in range(ways)]
    for step in range(ways - 1):
        moves = [(r, (r + 1) % ways, have[r][(r - step) % ways]) for r in range(ways)]
        for (source, target, _), array in zip(moves, net.round(moves), strict=True):
            have[target][(source - step) % ways] = array
    return [np.concatenate([have[r][i] for i in range(ways)]) for r in range(ways)]


def ring_all_reduce(net: Network, given: Arrays) -> Arrays:
    return ring_all_gather(net, ring_reduce_scatter(net, given))


def pairwise_all_to_all(net: Network, given: Arrays) -> Arrays:
    ways = len(given)
    parts = [np.split(array, ways) for array in given]
    got: list[dict[int, np.ndarray]] = [{r: parts[r][r]} for r in range(ways)]
    for step in range(1, ways):
        moves = [(r, (r + step) % ways, parts[r][(r + step) % ways]) for r in range(ways)]
        for (source, target, _), array in zip(moves, net.round(moves), strict=True):
            got[target][source] = array
    return [np.concatenate([got[r][i] for i in range(ways)]) for r in range(ways)]


def chain_broadcast(net: Network, given: Arrays) -> Arrays:
    value = given[0]
    for rank in range(len(given) - 1):
        (value,) = net.round([(rank, rank + 1, value)])
    return [value] * len(given)


def chain_reduce(net: Network, given: Arrays) -> Arrays:
    total = given[-1]
    for rank in range(len(given) - 1, 0, -1):
        (arrived,) = net.round([(rank, rank - 1, total)])
        total = given[rank - 1] + arrived
    return [total, *(np.zeros_like(total) for _ in given[1:])]


def direct_gather(net: Network, given: Arrays) -> Arrays:
    parts = [given[0], *(net.round([(r, 0, given[r])])[0] for r in range(1, len(given)))]
    joined = np.concatenate(parts)
    return [joined, *(np.zeros_like(joined) for _ in given[1:])]


def direct_scatter(net: Network, given: Arrays) -> Arrays:
    parts = np.split(given[0], len(given))
    return [parts[0], *(net.round([(0, r, parts[r])])[0] for r in range(1, len(given)))]


Algorithm = Callable[[Network, Arrays], Arrays]
ALGORITHMS: dict[str, tuple[Algorithm, type]] = {
    "all_reduce": (ring_all_reduce, AllReduce),
    "all_gather": (ring_all_gather, AllGather),
    "reduce_scatter": (ring_reduce_scatter, ReduceScatter),
    "all_to_all": (pairwise_all_to_all, AllToAll),
    "broadcast": (chain_broadcast, Broadcast),
    "reduce": (chain_reduce, Reduce),
    "gather": (direct_gather, CollectiveGather),
    "scatter": (direct_scatter, CollectiveScatter),
}


@pytest.mark.parametrize("ways", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_bytes_and_steps_are_those_of_the_algorithm(kind: str, ways: int) -> None:
    algorithm, operation = ALGORITHMS[kind]
    rows = ways * int(fresh(1).integers(1, 6))
    given = list(fresh(2).integers(-9, 9, (ways, rows, 3)).astype(np.float64))
    net = Network(ways)
    got = algorithm(net, [array.copy() for array in given])
    options = {"axis": "tp", "ways": ways, "dim": 0, "split": 0, "concat": 0}
    known = {k: v for k, v in options.items() if k in operation.attribute_types}
    operand = irc_value(given[0].shape)
    for mine, wanted in zip(got, operation(operand, **known).combine(given), strict=True):
        assert np.array_equal(mine, wanted)
    size = max(given[0].nbytes, got[0].nbytes)
    assert max(net.sent) == pytest.approx(sent(kind, ways, size))
    assert max(net.sent + net.received) == pytest.approx(traffic(kind, ways, size))
    assert net.rounds == steps(kind, ways)


def irc_value(shape: tuple[int, ...]) -> object:
    from irc.core import Value
    from irc.types import TensorType

    return Value(TensorType("f64", shape), None, 0)


def test_one_rank_sends_nothing() -> None:
    link = default_topology().link("nvlink")
    for kind in KINDS:
        assert sent(kind, 1, 4096) == 0
        assert link.time(kind, 1, 4096) == 0


def test_the_fastest_protocol_counts() -> None:
    link = Link((Protocol(1, 2, 1), Protocol(10, 0.5, 100)), (Protocol(5, 0, 10),))
    assert link.time("all_gather", 3, 3) == pytest.approx(1 + 2 * 2 + 2e-3)
    assert link.time("all_reduce", 3, 3_000_000) == pytest.approx(10 + 4 * 0.5 + 4e6 / 1e5)
    assert link.time("all_to_all", 4, 4000) == pytest.approx(5 + 3000 / 1e4)


def test_group_sizes_that_were_not_measured() -> None:
    known = {2: (Line(4, 100),), 4: (Line(8, 200),)}
    link = Link((Protocol(1, 1, 1),), (Protocol(1, 1, 1),), {"all_gather": known})
    latency = [link.time("all_gather", ways, 0) for ways in (2, 3, 4, 5, 8)]
    assert latency == pytest.approx([4, 6, 8, 10, 16])
    large = 8_000_000
    assert link.time("all_gather", 8, large) == pytest.approx(16 + 7e6 / 200e3)
    # what was never measured is modelled
    assert link.time("broadcast", 2, 0) == pytest.approx(2)


def test_measured_latency_that_falls_is_not_drawn_on() -> None:
    known = {2: (Line(9, 100),), 4: (Line(6, 100),)}
    link = Link((Protocol(1, 1, 1),), (Protocol(1, 1, 1),), {"all_gather": known})
    assert link.time("all_gather", 8, 0) == pytest.approx(6)


def test_hosts_decide_the_link() -> None:
    topology = default_topology()
    assert topology.link_of(range(8)) == "nvlink"
    assert topology.link_of([0, 8]) == "ethernet"
    assert topology.using("pcie").link_of([0, 1]) == "pcie"
    with pytest.raises(Error, match=r"no link 'nvlnk'; did you mean 'nvlink'"):
        topology.using("nvlnk")
    with pytest.raises(Error, match="no collective called 'allreduce'"):
        topology.time("allreduce", 2, 8)


def measured(
    kind: str, ways: int, lines: Sequence[Line], sizes: Sequence[int]
) -> list[Measurement]:
    times = [min(line.time(traffic(kind, ways, size)) for line in lines) for size in sizes]
    return [Measurement(kind, ways, n, us) for n, us in zip(sizes, times, strict=True)]


SIZES = [1 << n for n in range(12, 27)]
THREE = (Line(6.0, 20.0), Line(9.0, 120.0), Line(30.0, 300.0))


@pytest.mark.parametrize("lines", [THREE[:1], THREE[:2], THREE])
@pytest.mark.parametrize("ways", [2, 3, 8])
def test_a_fit_finds_the_constants_again(lines: tuple[Line, ...], ways: int) -> None:
    found = fit(measured("all_reduce", ways, lines, SIZES))["all_reduce"][ways]
    assert len(found) == len(lines)
    for mine, wanted in zip(found, lines, strict=True):
        assert mine.alpha_us == pytest.approx(wanted.alpha_us, rel=0.01)
        assert mine.gb_s == pytest.approx(wanted.gb_s, rel=0.01)


def test_a_fit_of_noisy_times_stays_near() -> None:
    exact = measured("all_gather", 4, THREE, SIZES)
    noise = fresh(3).uniform(0.97, 1.03, len(exact))
    noisy = [
        Measurement(m.kind, m.ways, m.size, m.us * float(f))
        for m, f in zip(exact, noise, strict=True)
    ]
    lines = fit(noisy)["all_gather"][4]
    assert worst_error(exact, lines) < 0.15


def test_times_that_do_not_grow_have_no_slope() -> None:
    flat = [Measurement("broadcast", 2, size, 5.0) for size in (4096, 8192, 65536)]
    (line,) = fit(flat)["broadcast"][2]
    assert line.time(1 << 16) == pytest.approx(5.0, rel=0.02)
    with pytest.raises(Error, match="that is no time"):
        fit([Measurement("broadcast", 2, 4096, 0.0)])


def test_the_shipped_constants_are_near_the_floor_of_nvlink() -> None:
    """450 GB/s per direction is what the link can do; NCCL reaches two thirds and more."""
    topology = default_topology()
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        size = 1 << 30
        rate = traffic(kind, 4, size) / topology.time(kind, 4, size) / 1e3
        assert 270 < rate < 450, kind
