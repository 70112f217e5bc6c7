"""Plugins on real GPUs, driven as TensorRT drives them."""

import json
from pathlib import Path

import pytest

from benchmarks.plugin_collectives import main
from benchmarks.plugin_ranks import PHASES
from irc.backends.cuda.runtime import device_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() < 2, reason="collectives need two GPUs"),
]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "overhead"])
def test_a_phase_of_the_benchmark(phase: str, tmp_path: Path) -> None:
    status = main(["--phase", phase, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "plugin_collectives.json").read_text())
    assert status == 0, found
