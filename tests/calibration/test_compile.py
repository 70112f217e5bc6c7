"""`--calibration DATA` of a compilation: the data is run first, and its statistics are used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.artifact.manifest import silent
from irc.backends import get
from irc.driver.pipelines import chosen_pipeline
from irc.driver.quantization import calibrated
from irc.driver.sources import find_source
from irc.errors import Error
from irc.passes.quantize import QuantizeModule
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


TWICE = """module @m dims(B=1:2:512) {
  weight @u.weight : f32[8, 4] = random("u", 1, 0.5)
  func @forward(%x: f32[B, 4]) -> (y: f32[B, 8], z: f32[B, 8], w: f32[B, 4]) {
    %y = linear %x, @u.weight : f32[B, 8]
    %c = full {value=100.0, shape=[1, 1], dtype="f32"} : f32[1, 1]
    %l = mul %x, %c : f32[B, 4]
    %z = linear %l, @u.weight : f32[B, 8]
    %w = matmul %z, @u.weight : f32[B, 4]
    return %y, %z, %w
  }
}
"""


@pytest.mark.parametrize("scheme", ["w8a8_sq_per_channel", "fp8", "w4a16_gptq"])
def test_a_weight_of_three_inputs_in_two_orientations(scheme: str, tmp_path: Path) -> None:
    """Each input has a scale of its own; the gram matrix is that of the first orientation."""
    x = fresh(6).standard_normal((64, 4)).astype(np.float32)
    data = saved(tmp_path / "data.npz", x=x)
    options: Any = {"quantize": scheme, "calibration": data, "observer": "min-max"}
    artifact = irc.compile(irc.parse(TWICE), tmp_path / "out", **options)
    plain = irc.evaluate(irc.parse(TWICE), {"x": x})
    if "gptq" in scheme:
        statistics, both = Statistics(tmp_path / "out.calibration"), np.concatenate([x, 100 * x])
        gram = statistics.gram("u", "u:1")
        np.testing.assert_allclose(gram, both.T @ both / 128, rtol=1e-3)
        return
    largest = [np.abs(values).max() for values in (x, 100 * x, plain["z"])]
    code = 448 if scheme == "fp8" else 127
    assert static_scales(artifact.module) == pytest.approx([most / code for most in largest], 1e-5)
    rounded = irc.evaluate(artifact.module, {"x": x})
    for name, wanted in plain.items():
        assert np.abs(rounded[name] - wanted).max() < 0.1 * np.abs(wanted).max()


def test_caches_where_all_linears_are_quantized(tmp_path: Path) -> None:
    module = irc.parse("""module @m dims(B=1:1:4, S=1:4:8, C=8:8:8) {
      weight @codes : i8[4, 8] = random("c", 1, 9.0)
      weight @scale : f32[4, 1] = random("s", 1, 0.1)
      func @forward(%x: f32[B, S, 8], %p: i32[B], %k0: f32[B, 2, C, 2])
          -> (k0: f32[B, 2, C, 2] aliases %k0) {
        %w = dequantize @codes, @scale : f32[4, 8]
        %k = linear %x, %w : f32[B, S, 4]
        %k0.1 = cache_update %k0, %k, %p : f32[B, 2, C, 2]
        return %k0.1
      }
    }""")
    x = fresh(7).standard_normal((1, 4, 8)).astype(np.float32)
    given = {"x": x, "p": np.zeros(1, np.int32), "k0": np.zeros((1, 2, 8, 2), np.float32)}
    data = saved(tmp_path / "data.npz", **given)
    options: Any = {"kv_cache": "int8", "calibration": data, "observer": "min-max"}
    artifact = irc.compile(module, tmp_path / "out", **options)
    largest = np.abs(irc.evaluate(module, given)["k0"]).max()
    assert static_scales(artifact.module) == pytest.approx([largest / 127], rel=1e-5)
    assert str(artifact.module.main.args[2].type) == "i8[B, 2, C, 2]"


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
    options = {"quantize": quantize, "kv_cache": "int8", "calibration": data}
    options |= {"budget": "9 bits"} if quantize == "auto" else {}
    source = find_source(module)
    pipeline = chosen_pipeline(get("onnx"), source, options)
    (chosen,) = (
        each
        for each in calibrated(pipeline, source, tmp_path / "out", silent)
        if isinstance(each, QuantizeModule)
    )
    assert chosen.calibration == str(tmp_path / "out.calibration")
    assert Statistics(tmp_path / "out.calibration").facts.gram == gram


def test_the_command_and_its_refusals(two: tuple[Path, Path, np.ndarray], tmp_path: Path) -> None:
    module, data, _ = two
    words: list[str | Path] = ["compile", module, "--quantize", "fp8", "--calibration"]
    works(*words, data, "-o", tmp_path / "out")
    calibration = tmp_path / "out.calibration"
    assert Statistics(calibration).sites() == ["a", "b"]
    works(*words, calibration, "--dry-run")
    message = refused(*words, data, "--observer", "kl", "--dry-run")
    assert "no observer called 'kl'; there are min-max, percentile" in message
    assert "there is no" in refused(*words, tmp_path / "none.npz", "-o", tmp_path / "new")
    new = (data, "-o", tmp_path / "new")
    assert "give int8 or fp8" in refused(*words, *new, "--kv-cache", "int4")
    assert "belong together" in refused(*words, *new, "--budget", "4 bits")
    assert not (tmp_path / "new.calibration").exists(), "wrong options are refused before the run"
    wider = TWO.replace("4]", "6]").replace("[5, 4", "[5, 6")
    other = TWO.replace("@a.weight", "@c.weight").replace("@two", "@other")
    for text, message in (
        (wider, r"statistics of 4 channels of a, not 6; .*calibrate this one"),
        (other, r"no statistics of c.*made from another model, two: calibrate"),
    ):
        options: dict[str, Any] = {"quantize": "fp8", "calibration": calibration}
        with pytest.raises(Error, match=message):
            irc.compile(irc.parse(text), tmp_path / "x", **options)
