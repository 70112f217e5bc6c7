"""Topologies: bytes and steps of collectives, times, links, fits and files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from irc.analysis.topology import KINDS, Line, Link, Protocol, sent, steps, traffic
from irc.analysis.topology_file import (
    default_topology,
    from_json,
    read_topology,
    to_json,
    write_topology,
)
from irc.analysis.topology_fit import Measurement, fit, worst_error
from irc.errors import Error
from tests.fresh import fresh

# Per kind: bytes sent by the busiest rank, bytes in its busier direction, and steps, for a global
# tensor of 1200 bytes over four ranks: rings, chains of whole tensors, pairs, and direct messages.
VOLUMES = {
    "all_reduce": (1800, 1800, 6),
    "all_gather": (900, 900, 3),
    "reduce_scatter": (900, 900, 3),
    "all_to_all": (900, 900, 3),
    "broadcast": (1200, 1200, 3),
    "reduce": (1200, 1200, 3),
    "gather": (300, 900, 3),
    "scatter": (900, 900, 3),
    "send": (1200, 1200, 1),
}


def test_volumes_of_collectives() -> None:
    assert set(VOLUMES) == set(KINDS)
    for kind, wanted in VOLUMES.items():
        assert (sent(kind, 4, 1200), traffic(kind, 4, 1200), steps(kind, 4)) == wanted, kind


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


def test_unmeasured_group_sizes_are_interpolated() -> None:
    known = {2: (Line(4, 100),), 4: (Line(8, 200),)}
    link = Link((Protocol(1, 1, 1),), (Protocol(1, 1, 1),), {"all_gather": known})
    latency = [link.time("all_gather", group_size, 0) for group_size in (2, 3, 4, 5, 8)]
    assert latency == pytest.approx([4, 6, 8, 10, 16])
    large = 8_000_000
    assert link.time("all_gather", 8, large) == pytest.approx(16 + 7e6 / 200e3)
    # a kind without measurements is modelled
    assert link.time("broadcast", 2, 0) == pytest.approx(2)
    falling = {2: (Line(9, 100),), 4: (Line(6, 100),)}  # which is not extrapolated
    link = Link((Protocol(1, 1, 1),), (Protocol(1, 1, 1),), {"all_gather": falling})
    assert link.time("all_gather", 8, 0) == pytest.approx(6)


def test_the_hosts_of_a_group_choose_the_link() -> None:
    topology = default_topology()
    assert topology.link_of(range(8)) == "nvlink"
    assert topology.link_of([0, 8]) == "ethernet"
    assert topology.using("pcie").link_of([0, 1]) == "pcie"
    with pytest.raises(Error, match=r"no link 'nvlnk'; did you mean 'nvlink'"):
        topology.using("nvlnk")
    with pytest.raises(Error, match="no collective called 'allreduce'"):
        topology.time("allreduce", 2, 8)


def measured(
    kind: str, group_size: int, lines: Sequence[Line], sizes: Sequence[int]
) -> list[Measurement]:
    times = [min(line.time(traffic(kind, group_size, size)) for line in lines) for size in sizes]
    return [Measurement(kind, group_size, n, us) for n, us in zip(sizes, times, strict=True)]


SIZES = [1 << n for n in range(12, 27)]
THREE = (Line(6.0, 20.0), Line(9.0, 120.0), Line(30.0, 300.0))


@pytest.mark.parametrize("lines", [THREE[:1], THREE[:2], THREE])
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_a_fit_recovers_the_constants(lines: tuple[Line, ...], group_size: int) -> None:
    found = fit(measured("all_reduce", group_size, lines, SIZES))["all_reduce"][group_size]
    assert len(found) == len(lines)
    for mine, wanted in zip(found, lines, strict=True):
        assert mine.alpha_us == pytest.approx(wanted.alpha_us, rel=0.01)
        assert mine.gb_s == pytest.approx(wanted.gb_s, rel=0.01)


def test_a_fit_of_noisy_times_stays_near() -> None:
    exact = measured("all_gather", 4, THREE, SIZES)
    noise = fresh(3).uniform(0.97, 1.03, len(exact))
    noisy = [
        Measurement(m.kind, m.group_size, m.size, m.us * float(f))
        for m, f in zip(exact, noise, strict=True)
    ]
    lines = fit(noisy)["all_gather"][4]
    assert worst_error(exact, lines) < 0.15


def test_times_that_do_not_grow_have_no_slope() -> None:
    flat = [Measurement("broadcast", 2, size, 5.0) for size in (4096, 8192, 65536)]
    (line,) = fit(flat)["broadcast"][2]
    assert line.time(1 << 16) == pytest.approx(5.0, rel=0.02)
    with pytest.raises(Error, match="expected a positive time"):
        fit([Measurement("broadcast", 2, 4096, 0.0)])


def test_the_shipped_constants_are_near_the_floor_of_nvlink() -> None:
    """450 GB/s per direction is what the link can do; NCCL reaches two thirds and more."""
    topology = default_topology()
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        size = 1 << 30
        rate = traffic(kind, 4, size) / topology.time(kind, 4, size) / 1e3
        assert 270 < rate < 450, kind


# -- files


def test_a_file_reads_back(tmp_path: Path) -> None:
    lines = {"all_to_all": {3: (Line(1.25, 99.5), Line(7.0, 123.456))}}
    topology = default_topology().with_measured("pcie", lines, "here and now")
    write_topology(topology, tmp_path / "mine.json")
    again = read_topology(tmp_path / "mine.json")
    assert again == topology
    assert again.link("pcie").measured == lines
    assert again.link("pcie").source == "here and now"
    assert again.link("nvlink") == default_topology().link("nvlink")


def test_measured_constants_are_merged() -> None:
    old = default_topology()
    new = old.with_measured("nvlink", {"all_reduce": {8: (Line(1, 2),)}}, "new")
    assert new.time("all_reduce", 4, 1 << 20) == old.time("all_reduce", 4, 1 << 20)
    assert new.link("nvlink").measured["all_reduce"][8] == (Line(1, 2),)
    other = old.with_measured("threads", {}, "new").link("threads")
    assert other.ring == old.link("nvlink").ring
    assert not other.measured


WRONG: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("name",), ..., ": name is missing"),
    (("device",), ..., ": device is missing"),
    (("device", "kernel_us"), ..., "device.kernel_us is missing"),
    (("links",), ..., ": links is missing"),
    (("format",), 2, "has the format 2"),
    (("within",), "nvlnk", "within is 'nvlnk', but links has no such link; did you mean 'nvlink'"),
    (("ranks_per_host",), 0, "ranks_per_host must be a whole number from 1 on, not 0"),
    (("device", "hbm_gb_s"), -1, "device.hbm_gb_s must be above 0, not -1"),
    (("device", "hbm_gb_s"), "fast", 'device.hbm_gb_s must be a number, not "fast"'),
    (("device", "kernel_us"), True, "device.kernel_us must be a number, not true"),
    (("device", "memory_bytes"), 1.5, "device.memory_bytes must be a whole number"),
    (("device", "peak_tflops"), {}, "device.peak_tflops must name the rate of one dtype"),
    (("device", "peak_tflops", "bf61"), 1, "peak_tflops.bf61 is not a dtype; did you mean 'bf16'"),
    (("device", "speed"), 3, "device.speed is not a field of a topology"),
    (("links",), [], "links must be a JSON object"),
    (("links", "pcie", "ring"), [], "links.pcie.ring must be a list that is not empty"),
    (("links", "pcie", "ring", 0), [1, 2], "ring[0] must be [base_us, hop_us, gb_s]"),
    (("links", "pcie", "ring", 0, 2), 0, "links.pcie.ring[0][2] must be above 0, not 0"),
    (("links", "pcie", "ring", 0, 0), -2, "links.pcie.ring[0][0] must not be negative, as -2 is"),
    (("links", "nvlink", "measured", "allreduce"), {}, "measured.allreduce is not a collective"),
    (("links", "nvlink", "measured", "reduce", "1"), [[1, 1]], "must be a number of ranks from 2"),
    (("links", "nvlink", "measured", "reduce", "2"), [[1]], "reduce.2[0] must be [alpha_us, gb_s]"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG)
def test_a_wrong_field_is_named(place: tuple[str | int, ...], value: Any, message: str) -> None:
    document = to_json(default_topology())
    inner: Any = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    if value is ...:
        del inner[place[-1]]
    with pytest.raises(Error) as found:
        from_json(document, "mine.json")
    assert message in found.value.message
    assert "mine.json" in found.value.message


def test_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(Error, match="cannot read the topology"):
        read_topology(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(Error, match="is not JSON"):
        read_topology(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(Error, match=r"list.json holds no JSON object"):
        read_topology(tmp_path / "list.json")
    with pytest.raises(Error, match="cannot write"):
        write_topology(default_topology(), tmp_path / "no" / "folder.json")
