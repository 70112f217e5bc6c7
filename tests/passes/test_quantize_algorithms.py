"""AWQ, GPTQ, SmoothQuant and the choice of schemes on arrays, against their definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.passes.quantize.auto import Budget, Choice, choose
from irc.passes.quantize.awq import GRID, Weights, output_error, powers, search
from irc.passes.quantize.gptq import compensation, gptq
from irc.passes.quantize.smoothquant import smooth
from irc.quantization.formats import FORMATS, Encoded, decode, encode
from tests.fresh import fresh

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
    found = compensated(gram_of(x), weights, near, format)
    assert found.codes.dtype == near.codes.dtype
    better = measured(x, decode(found) - weights)
    assert better < 0.3 * measured(x, decode(near) - weights)


@pytest.mark.parametrize(("format", "block"), FORMATS_AND_BLOCKS)
def test_gptq_of_independent_inputs_rounds_to_nearest(format: str, block: tuple[int, int]) -> None:
    _, weights = drawn(3)
    near = encode(weights, format, block, "f32")
    gram = np.diag(fresh(11).uniform(0.1, 9, INPUTS)).astype(np.float32)
    found = compensated(gram, weights, near, format)
    assert np.array_equal(decode(found), decode(near))


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
    found = sum(each.noise for each in chosen.values()) / 6
    step = 404  # what the last upgrade may have missed
    optimum = min(error for cost, error in every_choice(sites) if cost <= max(spent, 6 * 412))
    assert found == pytest.approx(optimum)
    assert 600 * bits - spent < step or all(each.scheme == "" for each in chosen.values())


def test_decibels_are_reached_with_few_bits() -> None:
    sites = {
        "a": [Choice("w4a16", 4, 0.02), Choice("w8a16", 8, 0.0001)],
        "b": [Choice("w4a16", 4, 0.0005), Choice("w8a16", 8, 0.00001)],
    }
    found = choose(sites, 2, Budget.parse("sqnr 30 dB"))
    assert [each.scheme for each in found.values()] == ["w8a16", "w4a16"]
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
