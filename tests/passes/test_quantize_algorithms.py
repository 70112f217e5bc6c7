"""AWQ, GPTQ, SmoothQuant and the choice of schemes: on arrays against their definitions, as
rewritings that keep results, and on calibrated models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
from irc.ir.verify import verify
from irc.passes.quantize import gptq as gptq_file
from irc.passes.quantize.algorithms import Context, rescale
from irc.passes.quantize.assignment import Assignment
from irc.passes.quantize.auto import Budget, Choice, choose
from irc.passes.quantize.awq import GRID, Weights, output_error, powers, search
from irc.passes.quantize.gptq import Compensation, compensation, gptq
from irc.passes.quantize.smoothquant import smooth
from irc.pipeline import Stats, run_pipeline
from irc.quantization.formats import FORMATS, Encoded, decode, encode
from irc.quantization.schemes import scheme_called
from irc.quantization.sites import by_input, find_sites
from irc.weights.checkpoint import Reader
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.layout import ROOT
from tests.rows import row_error

assert irc.passes
Array = np.ndarray[Any, Any]
INPUTS, OUTPUTS, TOKENS = 96, 40, 600


def correlated(rng: np.random.Generator) -> Array:
    """Inputs [TOKENS, INPUTS] of few directions, with eight outlier channels."""
    directions = rng.standard_normal((INPUTS // 4, INPUTS))
    x = rng.standard_normal((TOKENS, INPUTS // 4)) @ directions
    x += 0.3 * rng.standard_normal(x.shape)
    x[:, ::12] *= 30
    return x.astype(np.float32)


def gram_of(x: Array) -> Array:
    return x.T @ x / len(x)


def drawn(stream: int) -> tuple[Array, Array]:
    """(inputs, weights [OUTPUTS, INPUTS])."""
    rng = fresh(stream)
    return correlated(rng), rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)


def rounded(weights: Array, format: str, group: int, method: str = "absmax") -> Array:
    return decode(encode(weights, format, [1, group], "f32", method))


def measured(x: Array, error: Array) -> float:
    """The mean over tokens of the squared error of all outputs."""
    return float(np.square(x.astype(np.float64) @ error.T).sum() / len(x))


def test_the_gram_matrix_gives_the_error_of_the_outputs() -> None:
    x, weights = drawn(1)
    error = rounded(weights, "int4", 32) - weights
    assert output_error(error, gram_of(x)) == pytest.approx(measured(x, error), rel=1e-3)


FORMATS_AND_BLOCKS = [("int4", (1, 32)), ("int4", (1, 0)), ("uint4", (1, 24)), ("int8", (0, 0))]
FORMATS_AND_BLOCKS += [("mxfp4", (1, 32)), ("nvfp4", (1, 16)), ("fp8", (20, 32))]


def compensated(gram: Array, weights: Array, near: Encoded, format: str) -> Encoded:
    """The codes of GPTQ with the scales of other codes."""
    steps = decode(replace(near, codes=np.ones(weights.shape, np.float32), zeros=None))
    zeros = near.zeros
    if zeros is not None:
        zeros = np.repeat(zeros, weights.shape[1] // zeros.shape[1], axis=1)
    codes = gptq(weights, compensation(gram, "site"), FORMATS[format].codes, steps, zeros)
    return replace(near, codes=codes)


@pytest.mark.parametrize(("format", "block"), FORMATS_AND_BLOCKS)
@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_gptq_beats_rounding_to_nearest(format: str, block: tuple[int, int], method: str) -> None:
    x, weights = drawn(2)
    near = encode(weights, format, block, "f32", method)
    result = compensated(gram_of(x), weights, near, format)
    assert result.codes.dtype == near.codes.dtype
    better = measured(x, decode(result) - weights)
    assert better < 0.3 * measured(x, decode(near) - weights)


@pytest.mark.parametrize(("format", "block"), FORMATS_AND_BLOCKS)
def test_gptq_of_independent_inputs_rounds_to_nearest(format: str, block: tuple[int, int]) -> None:
    _, weights = drawn(3)
    near = encode(weights, format, block, "f32")
    gram = np.diag(fresh(11).uniform(0.1, 9, INPUTS)).astype(np.float32)
    result = compensated(gram, weights, near, format)
    assert np.array_equal(decode(result), decode(near))


@pytest.mark.parametrize("inputs", [12, 300])
def test_gptq_is_least_squares_after_every_column(inputs: int) -> None:
    """The columns left minimize the error of the outputs, with those before fixed: by a solver."""
    rng = fresh(4)
    x = rng.standard_normal((900, inputs)) @ rng.standard_normal((inputs, inputs))
    weights = rng.standard_normal((3, inputs)).astype(np.float32)
    gram = gram_of(x)
    near = encode(weights, "int8", [1, 0])
    values = decode(compensated(gram, weights, near, "int8")).astype(np.float64)
    order = np.argsort(-np.diag(gram))
    damped = gram + 0.01 * np.trace(gram) / inputs * np.eye(inputs)
    step = near.scales[:, 0]
    for at, column in enumerate(order):
        left, fixed = order[at:], order[:at]
        pull = damped[np.ix_(left, fixed)] @ (values - weights)[:, fixed].T
        wanted = weights[:, left].T - np.linalg.solve(damped[np.ix_(left, left)], pull)
        gap = np.abs(wanted[0] - values[:, column]) / step
        assert ((gap < 0.501) | (np.abs(wanted[0]) > 126 * step)).all()


def test_the_last_codes_of_gptq_are_the_best_of_all() -> None:
    rng = fresh(5)
    x = rng.standard_normal((50, 3)) @ rng.standard_normal((3, 3))
    weights = rng.standard_normal((1, 3)).astype(np.float32)
    gram = gram_of(x)
    damped = gram + 0.01 * np.trace(gram) / 3 * np.eye(3)
    near = encode(weights, "int4", [1, 0])
    codes = compensated(gram, weights, near, "int4").codes.astype(int)[0]
    last_input = int(np.argmin(np.diag(gram)))

    def error(tried: Any) -> float:
        gap = np.asarray(tried) * float(near.scales[0, 0]) - weights[0]
        return float(gap @ damped @ gap)

    every = {tried: error(tried) for tried in product(range(-8, 8), repeat=3)}
    assert min(every.values()) <= error(codes) * (1 + 1e-5)
    others = np.arange(3) != last_input
    last = min(error(np.where(others, codes, code)) for code in range(-8, 8))
    assert error(codes) == pytest.approx(last, rel=1e-4)


def test_gram_matrices_that_need_damping() -> None:
    zero = compensation(np.zeros((4, 4), np.float32), "site").upper
    assert np.allclose(zero, zero[0, 0] * np.eye(4))
    indefinite = np.eye(4, dtype=np.float32)
    indefinite[0, 1] = indefinite[1, 0] = 1.05
    upper = compensation(indefinite, "site").upper  # with a tenth of the mean on the diagonal
    inverse = np.linalg.inv(indefinite + 0.1 * np.eye(4))
    assert np.allclose(upper.T @ upper, inverse, rtol=1e-4, atol=1e-4)
    indefinite[0, 1] = indefinite[1, 0] = 9
    with pytest.raises(Error, match=r"gram matrix of layers\.3 is not positive definite"):
        compensation(indefinite, "layers.3")


def test_awq_takes_the_best_power_of_its_grid() -> None:
    x, first = drawn(6)
    second = fresh(7).standard_normal((8, INPUTS)).astype(np.float32)
    mean = np.abs(x).mean(axis=0)
    both = [Weights(each, FORMATS["int4"], (1, 32)) for each in (first, second)]

    def loss(factors: Array) -> float:
        return sum(
            measured(x, rounded(each * factors, "int4", 32) / factors - each)
            for each in (first, second)
        )

    factors, least = search(both, mean, gram_of(x))
    losses = [loss(powers(mean, step / GRID)) for step in range(GRID)]
    assert least == pytest.approx(loss(factors), rel=1e-2)
    assert least == pytest.approx(min(losses), rel=1e-2)
    assert least < 0.8 * losses[0]  # rounding to nearest


def test_awq_factors_are_finite_for_inputs_that_are_zero() -> None:
    x, weights = drawn(8)
    x[:, 5] = 0
    mean = np.abs(x).mean(axis=0)
    factors, _ = search([Weights(weights, FORMATS["int4"], (1, 32))], mean, gram_of(x))
    assert np.isfinite(factors).all() and (factors > 0).all()
    assert np.array_equal(powers(np.zeros(4, np.float32), 0.5), np.ones(4))


def test_smoothquant_equalizes_the_largest_values() -> None:
    x, weights = drawn(9)
    weights[:, 3] = 0
    largest, columns = np.abs(x).max(axis=0), np.abs(weights).max(axis=0)
    factors = smooth(largest, columns)
    assert factors[3] == 1
    both = columns > 0
    assert np.allclose((largest / factors)[both], (columns * factors)[both], rtol=1e-4)
    assert np.allclose(smooth(largest, columns, 0.0)[both], 1 / columns[both], rtol=1e-4)


def every_choice(sites: dict[str, list[Choice]]) -> list[tuple[float, float]]:
    """(bits, mean noise) of all combinations."""
    return [
        (sum(c.bits for c in each), sum(c.noise for c in each) / len(sites))
        for each in product(*sites.values())
    ]


@pytest.mark.parametrize("bits", [4.2, 5.0, 6.1, 7.0, 9.9, 16.0])
def test_bits_are_spent_where_they_save_most(bits: float) -> None:
    rng = fresh(10)
    noise = rng.uniform(0.5, 2, 6)
    sites = {
        f"layers.{i}": [
            Choice("", 1600, 0),
            Choice("w4a16", 412, 0.01 * float(noise[i])),
            Choice("w8a16", 816, 0.01 * float(noise[i]) / 256),
            Choice("worse", 900, 0.02 * float(noise[i])),
        ]
        for i in range(6)
    }
    chosen = choose(sites, 600, Budget.parse(f"{bits} bits"))
    spent = sum(each.bits for each in chosen.values())
    assert spent <= 600 * bits
    mean_noise = sum(each.noise for each in chosen.values()) / 6
    step = 404  # what the last upgrade may have missed
    optimum = min(error for cost, error in every_choice(sites) if cost <= max(spent, 6 * 412))
    assert mean_noise == pytest.approx(optimum)
    assert 600 * bits - spent < step or all(each.scheme == "" for each in chosen.values())


def test_decibels_are_reached_with_few_bits() -> None:
    sites = {
        "a": [Choice("w4a16", 4, 0.02), Choice("w8a16", 8, 0.0001)],
        "b": [Choice("w4a16", 4, 0.0005), Choice("w8a16", 8, 0.00001)],
    }
    chosen = choose(sites, 2, Budget.parse("sqnr 30 dB"))
    assert [each.scheme for each in chosen.values()] == ["w8a16", "w4a16"]
    assert [each.scheme for each in choose(sites, 2, Budget.parse("3 db")).values()] == [
        "w4a16"
    ] * 2


def test_one_scheme_for_all_sites_is_never_better() -> None:
    """The upgrade of a alone, which saves most per bit, leaves too few bits for those of all."""
    sites = {
        "a": [Choice("x", 4, 0.5), Choice("y", 5, 0.4), Choice("z", 8, 0.05)],
        "b": [Choice("x", 4, 0.5), Choice("y", 5, 0.1)],
    }
    for limit in (4.0, 5.0, 6.0):
        chosen = choose(sites, 2, Budget.parse(f"{limit} bits"))
        noise = sum(choice.noise for choice in chosen.values())
        for scheme in "xy":
            alike = [c for choices in sites.values() for c in choices if c.scheme == scheme]
            if sum(choice.bits for choice in alike) <= 2 * limit:
                assert noise <= sum(choice.noise for choice in alike)


@pytest.mark.parametrize("text", ["3 bits", "60 dB"])
def test_a_budget_out_of_reach_names_the_range(text: str) -> None:
    sites = {"a": [Choice("w4a16", 41.25, 0.01), Choice("w8a16", 81.25, 0.0001)]}
    with pytest.raises(Error, match=r"4\.125 to 8\.125 bits per weight give 20\.0 to 40\.0 dB"):
        choose(sites, 10, Budget.parse(text))


@pytest.mark.parametrize("text", ["", "4.5", "lots", "-3 bits", "4 bytes", "4 bits 30 dB"])
def test_a_budget_is_bits_or_decibels(text: str) -> None:
    with pytest.raises(Error, match=r'write bits per weight, as in "4\.5 bits", or "30 dB"'):
        Budget.parse(text)


# factors of inputs, whose inverse goes elsewhere


NORM = "%h = rms_norm %x, @norm : f32[B, 6]"
TWO = "%a = linear %h, @a.weight : f32[B, 6]\n %b = linear %h, @b.weight : f32[B, 6]"
SUM = "%y = add %a, %b : f32[B, 6]"
ONE = "%y = linear %h, @a.weight : f32[B, 6]"

# operations, how often the inverse goes into weights, and how often into a mul
CASES = {
    "norm": ([NORM, TWO, SUM], 1, 0),
    "norm with an offset": ([NORM.replace(" :", " {offset=1.0} :"), TWO, SUM], 0, 1),
    "norm with another user": ([NORM, TWO, "%c = add %a, %b : f32[B, 6]",
                                "%y = add %c, %h : f32[B, 6]"], 0, 1),
    "norm whose weight has another user": (
        ["%g = rms_norm %x, @norm : f32[B, 6]", "%h = rms_norm %g, @norm : f32[B, 6]", ONE], 0, 1),
    "layer norm": (["%h = layer_norm %x, weight=@norm, bias=@bias : f32[B, 6]", ONE], 1, 0),
    "layer norm without a weight": (["%h = layer_norm %x, bias=@bias : f32[B, 6]", ONE], 0, 1),
    "linear": (["%h = linear %x, @c.weight, bias=@bias : f32[B, 6]", ONE], 1, 1),
    "gated": (["%g = linear %x, @b.weight : f32[B, 6]", "%u = linear %x, @c.weight : f32[B, 6]",
               "%s = silu %g : f32[B, 6]", "%h = mul %s, %u : f32[B, 6]", ONE], 1, 1),
    "a product with itself": (
        ["%u = linear %x, @c.weight : f32[B, 6]", "%h = mul %u, %u : f32[B, 6]", ONE], 0, 2),
    "an argument": (["%h = add %x, %x : f32[B, 6]", ONE], 0, 1),
    "a transposed weight": (
        [NORM, "%t = transpose @a.weight {order=[1, 0]} : f32[6, 6]",
         "%y = matmul %h, %t : f32[B, 6]"], 1, 0),
    "weights with other users": (
        [NORM, "%a = linear %h, @a.weight : f32[B, 6]", "%y = matmul %a, @a.weight : f32[B, 6]"],
        0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_stay(case: str, tmp_path: Path) -> None:
    lines, folded, multiplied = CASES[case]
    weights = "\n".join(
        f'weight @{name} : f32[{sizes}] = random("{name}", 3, 1.0)'
        for name, sizes in {"norm": "6", "bias": "6"}.items()
        | dict.fromkeys(("a.weight", "b.weight", "c.weight"), "6, 6").items()
    )
    module = irc.parse(f"""module @m dims(B=1:2:9) {{
      {weights}
      func @forward(%x: f32[B, 6]) -> (y: f32[B, 6]) {{
        {chr(10).join(lines)}
        return %y
      }}
    }}""")
    rng = fresh(len(case))
    x = {"x": rng.standard_normal((5, 6)).astype(np.float32)}
    wanted = evaluate(module, x)["y"]
    sites = find_sites(module)
    write_folder(tmp_path, {site.name: x["x"] for site in sites})
    context = Context(module, Stats(), str(tmp_path))
    scheme = scheme_called("w4a16_awq")
    for group in by_input(sites):
        factors = rng.uniform(0.1, 10, 6).astype(np.float32)
        assigned = [Assignment(site, scheme, (1, 0)) for site in group]
        joint = rescale(assigned, context, "test", lambda factors=factors: factors)
        assert joint is None or np.allclose(joint, factors, rtol=1e-6)
    verify(module)
    counts = context.stats.counts
    assert counts.get("inverse folded", 0) == folded
    assert counts.get("inverse multiplied", 0) == multiplied
    after = evaluate(module, x)["y"]
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


# calibrated models


FOLDER = ROOT / "examples/outlier_llama"
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


def few_directions(stream: int, rows: int = 200) -> np.ndarray:
    """Inputs [3, rows, 16] of a few directions."""
    rng = fresh(stream)
    x = rng.standard_normal((3 * rows, 4)) @ rng.standard_normal((4, 16))
    x += 0.1 * rng.standard_normal(x.shape)
    return x.reshape(3, rows, 16).astype(np.float32)


@pytest.mark.parametrize("order", ["nk", "kn"])
@pytest.mark.parametrize("scheme", ["w4a16_awq", "w4a16_gptq", "w8a8_sq_per_channel_per_token"])
def test_experts(order: str, scheme: str, tmp_path: Path) -> None:
    x = few_directions(2)
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
    x = few_directions(3)
    write_folder(folder, {"w": x, "v": x[..., :10]}, gram)
    return folder


def quantize(module: Module, folder: Path, **options: object) -> Module:
    given = {"scheme": "w4a16_gptq", "calibration": str(folder)} | options
    text = ", ".join(f'{name}="{value}"' for name, value in given.items())
    run_pipeline(module, f"quantize{{{text}}}")
    return module


def test_codes_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quantize(linears(), calibrated(tmp_path))
    assert str(irc.parse(str(first))) == str(first)
    computed: list[str] = []

    def watched(gram: np.ndarray, site: str) -> Compensation:
        computed.append(site)
        return compensation(gram, site)

    monkeypatch.setattr(gptq_file, "compensation", watched)
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
