"""Default inputs of language models, and safe conversions of dtypes."""

import re

import ml_dtypes
import numpy as np
import pytest

from irc.backends.base import Port, Ports
from irc.errors import Error
from irc.generation.inputs import cache_range, complete, rounded
from irc.ir.dims import symbol

B, S, T, C = map(symbol, "BSTC")
CACHES = (Port("k0", "f32", (B, 2, C, 8), True), Port("v0", "bf16", (B, 2, C, 4), True))
LANGUAGE = Ports(
    (
        Port("input_ids", "i32", (B, S)),
        Port("positions", "i32", (B, S)),
        Port("past_lengths", "i32", (B,)),
        Port("logit_positions", "i32", (B, T)),
    ),
    CACHES,
    (Port("logits", "f32", (B, T, 10)),),
)
PLAIN = Ports((Port("x", "f32", (B,)), Port("n", "i32", (B,))), (), ())


def test_ids_alone_are_enough() -> None:
    found = complete(LANGUAGE, {"input_ids": np.array([[1, 2, 3], [4, 5, 6]])})
    assert list(found) == ["input_ids", "positions", "past_lengths", "logit_positions", "k0", "v0"]
    assert found["input_ids"].dtype == np.int32
    assert found["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found["past_lengths"].tolist() == [0, 0]
    assert found["logit_positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found["k0"].shape == (2, 2, 64, 8)
    assert found["v0"].shape == (2, 2, 64, 4)
    assert found["v0"].dtype == ml_dtypes.bfloat16
    assert all(found[name].dtype == np.int32 for name in list(found)[:4])
    assert not found["k0"].any()


def test_provided_inputs_are_kept() -> None:
    given = {
        "input_ids": np.array([[7]]),
        "past_lengths": np.array([5]),
        "logit_positions": np.array([[0]]),
        "k0": np.ones((1, 2, 9, 8), np.float32),
        "v0": np.ones((1, 2, 9, 4), np.float32),
    }
    found = complete(LANGUAGE, given)
    assert found["positions"].tolist() == [[5]]
    assert found["past_lengths"].tolist() == [5]
    assert found["k0"].shape == (1, 2, 9, 8)


def test_wrong_past_lengths_are_refused() -> None:
    with pytest.raises(Error, match="past_lengths is not 0, so the caches are required"):
        complete(LANGUAGE, {"input_ids": np.array([[7]]), "past_lengths": np.array([5])})
    message = re.escape("past_lengths has the shape [2], but it must be [1]")
    with pytest.raises(Error, match=message):
        complete(LANGUAGE, {"input_ids": np.array([[7]]), "past_lengths": np.array([0, 0])})


def test_more_tokens_than_the_cache_holds_are_refused() -> None:
    assert complete(LANGUAGE, {"input_ids": np.zeros((1, 20), int)}, (1, 20))["k0"].shape[2] == 20
    assert complete(LANGUAGE, {"input_ids": [[7]]}, (80, 96))["k0"].shape[2] == 80
    with pytest.raises(Error, match="has 21 tokens per row, but the cache of this model holds 20"):
        complete(LANGUAGE, {"input_ids": np.zeros((1, 21), int)}, (1, 20))


def test_unknown_and_missing_inputs_are_named() -> None:
    x, n = np.zeros(2, np.float32), np.zeros(2, np.int32)
    with pytest.raises(Error, match=r"no input 'xx'; did you mean 'x'\?; it has x, n"):
        complete(PLAIN, {"xx": x, "n": n})
    with pytest.raises(Error, match="the inputs lack n; the model takes x, n"):
        complete(PLAIN, {"x": x})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("x", kind) for kind in (np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8)],
        *[("n", kind) for kind in (np.int64, np.uint8, np.int16)],
    ],
)
def test_numbers_are_converted(name: str, kind: type) -> None:
    given = {"x": np.zeros(2, np.float32), "n": np.zeros(2, np.int32)}
    found = complete(PLAIN, given | {name: np.array([1, 2], kind)})[name]
    assert found.dtype == given[name].dtype
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", np.array([1.5, 2]), "the input n is float64, but it must be i32; convert it"),
        ("n", np.array([2**40, 0]), "the input n has numbers outside the range of i32"),
        ("x", np.array([True, False]), "the input x is bool, but it must be f32"),
        ("x", np.array(["a", "b"]), "the input x is <U1, but it must be f32"),
    ],
)
def test_other_conversions_are_refused(name: str, value: np.ndarray, message: str) -> None:
    given = {"x": np.zeros(2, np.float32), "n": np.zeros(2, np.int32)} | {name: value}
    with pytest.raises(Error, match=message):
        complete(PLAIN, given)


def test_the_capacity_of_caches() -> None:
    assert cache_range(CACHES, {"C": [1, 8, 100]}) == (1, 100)
    assert cache_range(CACHES, {}) == (0, 0)
    assert cache_range((Port("k", "f32", (1, 2, 32, 8), True),), {}) == (32, 32)
    assert [rounded(count, (0, 0)) for count in (1, 64, 65)] == [64, 64, 128]
    assert (rounded(65, (1, 100)), rounded(1, (80, 96))) == (100, 80)


@pytest.mark.parametrize("ids", [[1, 2, 3], [[[1]]], [[], []], np.zeros((0, 3), int)])
def test_ids_are_rows_of_tokens(ids: object) -> None:
    with pytest.raises(Error, match=r"input_ids has the shape .*, but it must be \[B, S\]"):
        complete(LANGUAGE, {"input_ids": np.asarray(ids, np.int64)})


@pytest.mark.parametrize("place", [-1, 3])
def test_logit_positions_are_positions_of_tokens(place: int) -> None:
    with pytest.raises(Error, match="logit_positions must lie between 0 and 2"):
        complete(LANGUAGE, {"input_ids": [[1, 2, 3]], "logit_positions": [[place]]})
