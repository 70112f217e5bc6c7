"""Histograms and observers against plain numpy, and the reader of calibration folders."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc.errors import Error
from irc.quantization import statistics as module
from irc.quantization.statistics import (
    BINS,
    FACTS,
    Histogram,
    RunningStatistics,
    Statistics,
    chosen_range,
    exponent_above,
    gram_of,
)
from irc.weights.safetensors import Tensors, write_tensors
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh


def long_tailed(rows: int, width: int) -> np.ndarray:
    """Normal numbers, a few of them large, and a channel of large ones."""
    random = fresh(1)
    found = random.standard_normal((rows, width)).astype(np.float32)
    found[random.random(found.shape) < 0.002] *= 40
    found[:, 0] *= 20
    return found


def observed(*pieces: np.ndarray) -> RunningStatistics:
    """What is remembered of pieces in this order."""
    found = RunningStatistics(pieces[0].shape[-1], gram=True)
    for piece in pieces:
        found.add(piece)
    return found


@pytest.mark.parametrize("scale", [1, 2.0**-30, 1e6, 1e-15])
def test_pieces_in_any_order_are_all_data_at_once(scale: float) -> None:
    data = long_tailed(700, 5) * np.float32(2.0) ** fresh(2).integers(-20, 20, (700, 1))
    data = (data * scale).astype(np.float32)
    data[:3] = 0
    cuts = np.sort(fresh(3).integers(0, 700, 6))
    pieces = np.split(data, cuts)
    fresh(4).shuffle(pieces)
    one, many = observed(data).state, observed(*pieces).state
    assert (one["histogram"] == many["histogram"]).all()
    edges = np.linspace(0, 2.0 ** exponent_above(np.abs(data).max()), BINS + 1)
    counts = np.histogram(np.abs(data).astype(float), edges)[0]
    assert (many["histogram"] == counts).all()
    assert (many["largest"] == np.abs(data).max(0)).all()
    assert one["rows"] == many["rows"] == 700
    np.testing.assert_allclose(many["total"], np.abs(data.astype(float)).sum(0), rtol=1e-5)
    gram = data.astype(float).T @ data / 700  # its sums are f32
    np.testing.assert_allclose(gram_of(many), gram, atol=1e-5 * np.abs(gram).max())


def test_gram_matrices_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAM_BLOCK", 3)
    data = long_tailed(50, 8)
    found = gram_of(observed(data[:20], data[20:]).state)
    np.testing.assert_allclose(found, data.T @ data / 50, rtol=1e-4, atol=1e-4)
    assert (found == found.T).all()


def test_the_range_doubles_only_as_far_as_needed() -> None:
    found = observed(np.array([[0.75]], np.float32), np.zeros((3, 1), np.float32))
    counts = found.state["histogram"]
    assert (counts[0], counts[BINS * 3 // 4]) == (3, 1)  # the range is 1
    found.add(np.array([[1.0]], np.float32))  # a power of two is inside the next range, 2
    counts = found.state["histogram"]
    assert (counts[BINS * 3 // 8], counts[BINS // 2]) == (1, 1)


def quantized(x: np.ndarray, limit: float, dtype: str) -> np.ndarray:
    """|x| rounded to codes of a dtype whose largest stands for `limit`."""
    if dtype == "i8":
        return np.clip(np.round(x / (limit / 127)), 0, 127) * (limit / 127)
    codes = np.minimum(x / (limit / 448), 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * (limit / 448)


@pytest.mark.parametrize("dtype", ["i8", "f8e4m3"])
def test_mse_is_the_best_range_for_the_data_itself(dtype: str, tmp_path: Path) -> None:
    data = fresh(6).standard_normal((50_000, 4)).astype(np.float32)
    data[7, 2] = -12
    statistics = write_folder(tmp_path, {"a": data}, gram=False)
    sizes = np.abs(data.ravel().astype(np.float64))

    def error(limit: float) -> float:
        return float(((sizes - quantized(sizes, limit, dtype)) ** 2).mean())

    found = error(statistics.scale_range("a", "mse", dtype))
    assert found <= 1.25 * min(error(limit) for limit in np.linspace(0.1, 1, 40) * 12)
    assert statistics.scale_range("a", "min-max", dtype) == 12
    assert statistics.scale_range("a", dtype=dtype) == statistics.scale_range(
        "a", {"i8": "mse", "f8e4m3": "min-max"}[dtype], dtype
    )
    assert dtype == "f8e4m3" or error(12) > 1.7 * found


@pytest.mark.parametrize("percent", [50, 99, 99.99, 100])
def test_percentiles(percent: float, tmp_path: Path) -> None:
    data = long_tailed(3000, 2)
    statistics = write_folder(tmp_path, {"a": data})
    found = statistics.scale_range("a", f"percentile:{percent}")
    wanted = np.percentile(np.abs(data), percent, method="inverted_cdf")
    assert wanted <= found <= wanted + statistics.histogram("a").width
    if percent == 99.99:
        assert statistics.scale_range("a", "percentile") == found


def test_entropy_cuts_a_thin_tail_and_keeps_a_uniform_range() -> None:
    counts = np.zeros(BINS, np.int64)
    counts[:512] = 1000
    assert chosen_range(Histogram(counts, 1.0, 512.0), "entropy", "i8") == 512
    counts[:2000] = 1e6 * np.exp(-np.arange(2000) / 60)
    counts[4000] = 1
    assert 200 < chosen_range(Histogram(counts, 1.0, 4000.5), "entropy", "i8") < 1500


def divergence(counts: np.ndarray, bins: int) -> float:
    """The divergence of 128 levels from a clipped histogram, written out."""
    p = counts[:bins].astype(float)
    p[0] = p[1]
    q = np.zeros(bins)
    codes = np.array([round((i + 0.5) / bins * 127) for i in range(bins)])
    for code in set(codes.tolist()):
        level = [i for i in np.flatnonzero(codes == code) if p[i]]
        for i in level:
            q[i] = sum(p[j] for j in level) / len(level)
    p[-1] += counts[bins:].sum()
    p, q = p / p.sum(), q / q.sum()
    return sum(a * np.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a)


def test_entropy_is_the_least_divergence() -> None:
    counts = np.zeros(BINS, np.int64)
    counts[:1000] = fresh(5).integers(0, 50, 1000) * np.linspace(1, 0, 1000) ** 4
    counts[999] = 1
    found = chosen_range(Histogram(counts, 1.0, 1000.0), "entropy", "i8")
    tried = {bins: divergence(counts, bins) for bins in [*range(128, 1000, 32), 1000]}
    assert tried[round(found)] <= min(tried.values()) * (1 + 1e-9)


def test_zeros_have_the_range_1(tmp_path: Path) -> None:
    statistics = write_folder(tmp_path, {"a": np.zeros((4, 3), np.float32)})
    for observer in ("", "min-max", "percentile", "entropy", "mse"):
        assert statistics.scale_range("a", observer) == 1


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        ("entropi", "did you mean 'entropy'"),
        ("mse:3", "no observer called 'mse:3'"),
        ("percentile:0", "above 0 and up to 100"),
        ("percentile:x", "above 0 and up to 100"),
        ("percentile:101", "above 0 and up to 100"),
    ],
)
def test_unknown_observers(observer: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Error, match=message):
        write_folder(tmp_path, {"a": np.ones((4, 3), np.float32)}).scale_range("a", observer)


def test_the_reader_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"holds no complete calibration.*irc calibrate SRC"):
        Statistics(tmp_path)
    found = write_folder(tmp_path, {"a.b": np.ones((4, 3), np.float32)}, gram=False)
    assert (found.sites(), found.facts.tokens, found.has_gram("a.b")) == (["a.b"], 4, False)
    with pytest.raises(Error, match=r"no gram matrix of a.b; calibrate with --gram"):
        found.gram("a.b")
    with pytest.raises(
        Error, match=r"no statistics of a.c; did you mean 'a.b'\?.*another model, m"
    ):
        found.mean("a.c")


@pytest.mark.parametrize("bad", [np.array([1, np.nan, 2], np.float32), np.zeros(0, np.float32)])
def test_the_reader_refuses_statistics_without_numbers(bad: np.ndarray, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": np.ones((4, 3), np.float32)}).folder
    path = folder / "statistics.safetensors"
    write_tensors(path, {**Tensors(path), "a/largest": bad})
    with pytest.raises(Error, match="a/largest is empty or has NaN"):
        Statistics(folder).largest("a")


def test_the_facts_are_checked(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": np.ones((4, 3), np.float32)}).folder
    facts = json.loads((folder / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps(facts | {"tokens": "many"}))
    with pytest.raises(Error, match="is damaged"):
        Statistics(folder)
