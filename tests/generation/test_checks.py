"""Results that count out-of-range indices and dropped lookups become Errors."""

from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.generation.checks import checked


def counts(**numbers: Any) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int32) for name, number in numbers.items()}


def test_counts_of_zero_are_removed() -> None:
    zeros = counts(ids_out_of_range=0, keys_out_of_range=0, capacity_overflow=0)
    assert list(checked({"y": np.ones(3), **zeros}, ["ids", "keys"])) == ["y"]


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("keys_out_of_range", 1, r"indices from the input keys are out of range \(1 of them\)"),
        (
            "computed_ids_out_of_range",
            7,
            r"indices from several inputs are out of range \(7 of them\)",
        ),
        ("capacity_overflow", 3, "need a capacity of 3; compile with capacity=3"),
    ],
)
def test_counts_are_errors(name: str, number: int, message: str) -> None:
    with pytest.raises(Error, match=message):
        checked(counts(**{name: number}), ["keys"])


def test_results_of_the_model_with_such_names_stay() -> None:
    own = {
        **counts(light_out_of_range=4),
        "keys_out_of_range": np.ones((2, 3), np.int32),
        "capacity_overflow": np.array(1.5, np.float32),
    }
    assert list(checked(own, ["keys"])) == list(own)
