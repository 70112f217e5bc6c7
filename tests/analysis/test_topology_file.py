"""Topology files: a round trip, and errors that name the wrong field."""

import json
from pathlib import Path
from typing import Any

import pytest

from irc.analysis.topology import Line
from irc.analysis.topology_file import (
    default_topology,
    from_json,
    read_topology,
    to_json,
    write_topology,
)
from irc.errors import Error

Path_ = tuple[str | int, ...]


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
    fresh = old.with_measured("threads", {}, "new").link("threads")
    assert fresh.ring == old.link("nvlink").ring
    assert not fresh.measured


WRONG: list[tuple[Path_, Any, str]] = [
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
    (("device", "peak_tflops", "bf61"), 1, "peak_tflops.bf61 is no dtype; did you mean 'bf16'"),
    (("device", "speed"), 3, "device.speed is no field of a topology"),
    (("links",), [], "links must be a JSON object"),
    (("links", "pcie", "ring"), [], "links.pcie.ring must be a list that is not empty"),
    (("links", "pcie", "ring", 0), [1, 2], "ring[0] must be [base_us, hop_us, gb_s]"),
    (("links", "pcie", "ring", 0, 2), 0, "links.pcie.ring[0][2] must be above 0, not 0"),
    (("links", "pcie", "ring", 0, 0), -2, "links.pcie.ring[0][0] must not be negative, as -2 is"),
    (("links", "nvlink", "measured", "allreduce"), {}, "measured.allreduce is no collective"),
    (("links", "nvlink", "measured", "reduce", "1"), [[1, 1]], "must be a number of ranks from 2"),
    (("links", "nvlink", "measured", "reduce", "2"), [[1]], "reduce.2[0] must be [alpha_us, gb_s]"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG)
def test_a_wrong_field_is_named(place: Path_, value: Any, message: str) -> None:
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
