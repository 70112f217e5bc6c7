"""`--calibration DATA` of a compilation: the data is run first, and its statistics are used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.artifact.manifest import silent
from irc.driver.quantization import Quantization
from irc.driver.sources import find_source
from irc.errors import Error
from irc.quantization.statistics import Statistics
from irc.weights.checkpoint import Reader
from tests.calibration.test_calibrate import TWO, saved
from tests.cli.runner import refused, works
from tests.fresh import fresh


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, np.ndarray]:
    """A module, data for it, and the data's array."""
    (tmp_path / "m.irc").write_text(TWO)
    x = fresh(4).standard_normal((6, 4))
    return tmp_path / "m.irc", saved(tmp_path / "data.npz", x=x, shift=np.zeros(4)), x


def static_scales(module: irc.Module) -> list[float]:
    """The scales of the quantized inputs."""
    scales = [op.operands[1].producer for op in module.ops() if op.opname == "quantize"]
    return [op.attributes["value"] for op in scales if op is not None and op.opname == "full"]


def test_the_data_is_run_beside_the_artifact(
    two: tuple[Path, Path, np.ndarray], tmp_path: Path
) -> None:
    module, data, x = two
    options: dict[str, Any] = {"quantize": "fp8", "calibration": data, "observer": "mse"}
    artifact = irc.compile(module, tmp_path / "out", **options)
    statistics = Statistics(tmp_path / "out.calibration")
    assert not statistics.facts.gram
    scales = static_scales(artifact.module)
    best = [statistics.scale_range(s, "mse", "f8e4m3") / 448 for s in ("a", "b")]
    assert scales == pytest.approx(best)

    stages: list[str] = []
    options["progress"] = lambda stage, fraction: stages.append(stage)
    irc.compile(module, tmp_path / "out", **options)
    assert "calibrating" not in stages
    options["calibration"] = tmp_path / "out.calibration"
    again = irc.compile(module, tmp_path / "other", **options)
    assert static_scales(again.module) == scales
    del options["observer"]
    largest = static_scales(irc.compile(module, tmp_path / "other", **options).module)
    assert largest[0] == pytest.approx(np.abs(x).max() / 448, rel=1e-6)
    assert largest[1] == pytest.approx(statistics.largest("b").max() / 448)
    assert not (tmp_path / "other.calibration").exists()


def test_the_second_level_of_scales_covers_the_largest_input(tmp_path: Path) -> None:
    x = fresh(5).standard_t(2, (50, 16)).astype(np.float32)
    data = saved(tmp_path / "data.npz", x=x, shift=np.zeros(16))
    module = irc.parse(TWO.replace("4]", "16]"))
    options: dict[str, Any] = {"quantize": {"a": "nvfp4"}, "calibration": data}
    artifact = irc.compile(module, tmp_path / "out", backend="reference", **options)
    scales = [
        op.operands[1].producer for op in artifact.module.ops() if op.opname == "dynamic_scale"
    ]
    assert scales[0] is not None
    smoothed = x * Reader(artifact.module).read(artifact.module.weights["a.input_factors"])
    assert scales[0].attributes["value"] == pytest.approx(np.abs(smoothed).max() / 448 / 6)


@pytest.mark.parametrize(
    ("quantize", "gram"),
    [
        ("w4a16_awq", True),
        ("int4_gptq", True),
        ("auto", True),
        ("w8a8_sq", False),
        ({"*a": "w8a16", "*": "int4_awq"}, True),
        ({"*a": None, "*": "fp8"}, False),
        ("", False),
    ],
)
def test_algorithms_get_the_gram_matrices_that_they_need(
    quantize: Any, gram: bool, two: tuple[Path, Path, np.ndarray], tmp_path: Path
) -> None:
    module, data, _ = two
    budget = "9 bits" if quantize == "auto" else ""
    options = Quantization(quantize, kv_cache="int8", calibration=data, budget=budget)
    folder = options.calibrated(find_source(module), tmp_path / "out", silent)
    assert folder == tmp_path / "out.calibration"
    assert Statistics(tmp_path / "out.calibration").facts.gram == gram


def test_the_command_and_its_refusals(two: tuple[Path, Path, np.ndarray], tmp_path: Path) -> None:
    module, data, _ = two
    words: list[str | Path] = ["compile", module, "--quantize", "fp8", "--calibration"]
    works(*words, data, "-o", tmp_path / "out")
    assert Statistics(tmp_path / "out.calibration").sites() == ["a", "b"]
    works(*words, tmp_path / "out.calibration", "--dry-run")
    assert "give the folder of irc calibrate, or -o DIR without --dry-run" in refused(
        *words, data, "--dry-run"
    )
    message = refused(*words, data, "--observer", "kl", "--dry-run")
    assert "no observer called 'kl'; there are min-max, percentile" in message
    assert "there is no" in refused(*words, tmp_path / "none.npz", "-o", tmp_path / "new")
    new = (data, "-o", tmp_path / "new")
    assert "give int8 or fp8" in refused(*words, *new, "--kv-cache", "int4")
    assert "belong together" in refused(*words, *new, "--budget", "4 bits")
    assert not (tmp_path / "new.calibration").exists(), "wrong options are refused before the run"
    other = TWO.replace("4]", "6]").replace("[5, 4", "[5, 6")
    with pytest.raises(Error, match=r"statistics of 4 channels of a, not 6; .*calibrate this one"):
        irc.compile(
            irc.parse(other),
            tmp_path / "x",
            quantize="fp8",
            calibration=tmp_path / "out.calibration",
        )
    other = TWO.replace("@a.weight", "@c.weight").replace("@two", "@other")
    with pytest.raises(Error, match=r"no statistics of c.*made from another model, two: calibrate"):
        irc.compile(
            irc.parse(other),
            tmp_path / "x",
            quantize="fp8",
            calibration=tmp_path / "out.calibration",
        )
