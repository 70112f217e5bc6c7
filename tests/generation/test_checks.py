"""Results that count what went wrong become Errors, and no results."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from irc.backends.base import Program
from irc.backends.fallback import FallbackProgram
from irc.errors import Error
from irc.generation.checks import checked

PLAIN = cast("Program", None)


def counts(**numbers: Any) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int32) for name, number in numbers.items()}


def test_counts_of_nothing_are_left_out() -> None:
    results = {"y": np.ones(3), **counts(ids_outside=0, keys_outside=0, overflow=0)}
    assert list(checked(PLAIN, results, ["ids", "keys"])) == ["y"]


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("keys_outside", 1, "the input keys has 1 number that is no row of the model's table"),
        ("ids_outside", 7, "the input ids has 7 numbers that are no row"),
        ("overflow", 3, "3 ids found no room on the way to their rows; compile with a larger"),
    ],
)
def test_what_is_counted_is_said(name: str, number: int, message: str) -> None:
    with pytest.raises(Error, match=message):
        checked(PLAIN, counts(**{name: number}), ["keys"])


def test_results_of_the_model_itself_stay() -> None:
    """A result is no count because of its name alone."""
    own = {
        **counts(light_outside=4),
        "keys_outside": np.ones((2, 3), np.int32),
        "overflow": np.array(1.5, np.float32),
    }
    assert list(checked(PLAIN, own, ["keys"])) == list(own)


def test_ids_that_were_looked_up_again_are_only_counted() -> None:
    program = FallbackProgram(PLAIN, lambda: PLAIN, again=True)
    assert list(checked(program, counts(overflow=3, ids_outside=0), ["ids"])) == ["overflow"]
    with pytest.raises(Error, match="the input ids has 2 numbers"):
        checked(program, counts(ids_outside=2), ["ids"])
