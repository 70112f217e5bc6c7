"""AWQ, GPTQ, SmoothQuant and auto on a calibrated language model, and on experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.driver import open_model
from irc.errors import Error
from irc.generation.model import Model
from irc.generation.quality import measure_quality
from irc.ir.core import Module
from irc.passes.quantize import gptq
from irc.pipeline import run_pipeline
from irc.weights.checkpoint import Reader
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.rows import row_error

assert irc.passes
FOLDER = Path(__file__).parents[2] / "examples" / "outlier_llama"
Compile = Callable[..., Model]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration folder of the model with outlier channels."""
    folder = tmp_path_factory.mktemp("calibration") / "c"
    data = FOLDER / "calibration.txt"
    irc.calibrate(FOLDER, data, folder, gram=True, batches=6, dtype="f32")
    return folder


@pytest.fixture(scope="module")
def compiled(calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    def compile(scheme: str = "", **options: Any) -> Model:
        folder = tmp_path_factory.mktemp("model") / "m"
        options |= {"quantize": scheme, "calibration": calibration} if scheme else {}
        irc.compile(FOLDER, folder, dtype="f32", **options)
        return open_model(folder)

    return compile


@pytest.fixture(scope="module")
def error(compiled: Compile) -> Callable[[Model], float]:
    """The mean Kullback-Leibler divergence of a model from the original."""
    plain = compiled()
    ids = plain.tokenizer.encode((FOLDER / "heldout.txt").read_text())[4096:6144]
    return lambda model: measure_quality(model, plain, ids, 128).kl or 0.0


def test_algorithms_beat_rounding_to_nearest(
    compiled: Compile, error: Callable[[Model], float], calibration: Path
) -> None:
    """The data is the same in every run."""
    nearest = error(compiled("w4a16", group=32))
    assert error(compiled("w4a16_awq", group=32)) < 0.85 * nearest
    assert error(compiled("w4a16_gptq", group=32)) < 0.85 * nearest
    gptq = error(compiled("w4a16_gptq"))
    assert error(compiled("auto", budget="4.25 bits")) < 1.1 * gptq  # as many bits
    assert error(compiled("auto", budget="4.5 bits")) < min(gptq, error(compiled("w4a16_awq")))


@pytest.mark.parametrize("scheme", ["w4a16_awq", "w4a16_gptq"])
def test_sharded_is_unsharded(scheme: str, compiled: Compile) -> None:
    ids = fresh(1).integers(0, 2048, (1, 20)).astype(np.int32)
    one = compiled(scheme, group=32).run({"input_ids": ids})["logits"]
    two = compiled(scheme, group=32, mesh="tp=2").run({"input_ids": ids})["logits"]
    assert row_error(two, one, rounded=False) < 1e-3  # MatMulNBits has 16 bits of its inputs


def experts(order: str) -> Module:
    """Three experts of 16 inputs and 10 outputs, their weights [E, N, K] or [E, K, N]."""
    if order == "nk":
        weight, turn = "10, 16", "%t = transpose @w.weight {order=[0, 2, 1]} : f32[3, 16, 10]"
    else:
        weight, turn = "16, 10", ""
    return irc.parse(f"""module @m dims(B=1:4:9) {{
      weight @w.weight : f32[3, {weight}] = random("w", 5, 1.0)
      func @forward(%x: f32[3, B, 16]) -> (y: f32[3, B, 10]) {{
        {turn}
        %y = matmul %x, {"%t" if turn else "@w.weight"} : f32[3, B, 10]
        return %y
      }}
    }}""")


def correlated(stream: int, rows: int = 200) -> np.ndarray:
    """Inputs [3, rows, 16] of a few directions."""
    rng = fresh(stream)
    x = rng.standard_normal((3 * rows, 4)) @ rng.standard_normal((4, 16))
    x += 0.1 * rng.standard_normal(x.shape)
    return x.reshape(3, rows, 16).astype(np.float32)


@pytest.mark.parametrize("order", ["nk", "kn"])
@pytest.mark.parametrize("scheme", ["w4a16_awq", "w4a16_gptq", "w8a8_sq_per_channel_per_token"])
def test_experts(order: str, scheme: str, tmp_path: Path) -> None:
    x = correlated(2)
    write_folder(tmp_path, {"w": x})
    wanted = evaluate(experts(order), {"x": x})["y"]

    def error(scheme: str) -> float:
        module = experts(order)
        run_pipeline(module, f'quantize{{scheme="{scheme}", calibration="{tmp_path}"}}')
        for weight in module.weights.values():
            Reader(module).check(weight)
        return float(np.square(evaluate(module, {"x": x})["y"] - wanted).mean())

    if scheme.startswith("w8"):
        assert error(scheme) < 1e-3 * np.square(wanted).mean()
    else:
        assert error(scheme) < (2 if scheme.endswith("awq") else 0.8) * error("w4a16")


LINEAR = """module @m dims(B=1:4:9) {{
  weight @w.weight : f32[10, 16] = random("w", {seed}, 1.0)
  weight @v.weight : f32[10, 10] = random("v", 6, 1.0)
  func @forward(%x: f32[B, 16]) -> (y: f32[B, 10]) {{
    %h = linear %x, @w.weight : f32[B, 10]
    %y = linear %h, @v.weight : f32[B, 10]
    return %y
  }}
}}"""


def linears(seed: int = 5) -> Module:
    return irc.parse(LINEAR.format(seed=seed))


def calibrated(folder: Path, gram: bool = True) -> Path:
    x = correlated(3)
    write_folder(folder, {"w": x, "v": x[..., :10]}, gram)
    return folder


def quantize(module: Module, folder: Path, **options: object) -> Module:
    given = {"scheme": "w4a16_gptq", "calibration": str(folder)} | options
    text = ", ".join(f'{name}="{value}"' for name, value in given.items())
    run_pipeline(module, f"quantize{{{text}}}")
    return module


def test_codes_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quantize(linears(), calibrated(tmp_path))
    computed: list[str] = []
    original = gptq.compensation

    def compensation(gram: np.ndarray, site: str) -> gptq.Compensation:
        computed.append(site)
        return original(gram, site)

    monkeypatch.setattr(gptq, "compensation", compensation)
    assert str(quantize(linears(), tmp_path)) == str(first)
    assert computed == []
    (lost,) = (tmp_path / "gptq").glob("v-*.safetensors")
    lost.unlink()
    assert str(quantize(linears(), tmp_path)) == str(first)
    assert computed == ["v"]
    quantize(linears(seed=6), tmp_path)
    assert computed == ["v", "w"]
    quantize(linears(seed=6), tmp_path, scheme="w8a16_gptq")
    assert computed == ["v", "w", "w", "v"]


def test_gptq_survives_the_text_and_is_not_done_twice(tmp_path: Path) -> None:
    module = quantize(linears(), calibrated(tmp_path))
    text = str(module)
    assert text == str(irc.parse(text))
    with pytest.raises(Error, match="quantized already"):
        run_pipeline(module, f'quantize{{scheme="w4a16_gptq", calibration="{tmp_path}"}}')


@pytest.mark.parametrize(
    ("scheme", "gram", "message"),
    [
        ("w4a16_gptq", False, "has no gram.* of w; calibrate with --gram"),
        ("w4a16_awq", False, "has no gram.* of w; calibrate with --gram"),
        ("auto", True, r"the budget of 2 bits cannot be met: 6\.\d+ to 32\.000 bits per weight"),
    ],
)
def test_refusals(scheme: str, gram: bool, message: str, tmp_path: Path) -> None:
    budget = {"budget": "2 bits"} if scheme == "auto" else {}
    with pytest.raises(Error, match=message):
        quantize(linears(), calibrated(tmp_path, gram), scheme=scheme, **budget)


@pytest.mark.parametrize("scheme", ["w4a16_awq", "w4a16_gptq", "w8a8_sq"])
def test_algorithms_need_a_calibration(scheme: str) -> None:
    with pytest.raises(Error, match=f"{scheme} needs statistics .*give --calibration DATA"):
        run_pipeline(linears(), f'quantize{{scheme="{scheme}"}}')


def test_auto_works_without_a_calibration() -> None:
    module = linears()
    (step,) = run_pipeline(module, 'quantize{scheme="auto", budget="9 bits"}')
    kinds = {weight.type.dtype for weight in module.weights.values()}
    assert kinds & {"i4", "i8"}
    assert any(note.startswith("auto: ") for note in step.stats.notes)
