"""Rows that are stepped apart, moved, cleared and set back give what a sequence gives alone."""

from __future__ import annotations

import numpy as np
import pytest

from irc.errors import Error
from irc.generation.rows import Rows
from tests.backends.decoder import Decoder, close
from tests.fresh import fresh

DIMS = {"S": (1, 4, 6), "C": (64, 64, 64)}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.of(tmp_path_factory.mktemp("decoder"))


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random tokens."""
    return [fresh(n).integers(0, 61, n).tolist() for n in lengths]


def alone(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """The logits [V] after a sequence, by the reference."""
    return Rows(decoder.reference, {}, [tokens], 64).start()[0]


def test_a_draft_is_verified_and_forgotten(decoder: Decoder) -> None:
    rows = Rows.empty(decoder.program, {}, 2, 64)
    assert rows.can_roll_back
    one, two = prompts_of(6, 4)
    rows.step([one[:3], two[:3]])
    logits = rows.step_all([one[3:], two[3:]])
    assert [*map(len, logits)] == [3, 1]
    for count in (4, 5, 6):
        close(logits[0][count - 4], alone(decoder, one[:count]))
    rows.past = np.array([4, 4])
    close(
        rows.step([[9], [8]]), np.stack([alone(decoder, [*one[:4], 9]), alone(decoder, [*two, 8])])
    )
    with pytest.raises(Error, match=r"at most \[5, 5\] tokens .*\[6, 5\]"):
        rows.past = np.array([6, 5])
    with pytest.raises(ValueError, match="read-only"):
        rows.past[0] = 1


def test_beams_of_a_prompt_share_its_start(decoder: Decoder) -> None:
    prompts = prompts_of(7, 2)
    rows = Rows(decoder.program, DIMS, prompts, 64, width=2)
    wanted = np.stack([alone(decoder, prompt) for prompt in prompts]).repeat(2, 0)
    close(rows.start(), wanted)
    rows.copy([1, 0, 3, 3], [0, 1, 2, 3])
    texts = [[*prompts[at // 2], token] for at, token in enumerate((3, 4, 5, 6))]
    close(rows.step([text[-1:] for text in texts]), np.stack([alone(decoder, t) for t in texts]))


def test_rows_that_are_not_there(decoder: Decoder) -> None:
    rows = Rows.empty(decoder.program, {}, 2, 64)
    with pytest.raises(Error, match="expected some of rows 0 to 1, found 2 from 1"):
        rows.step([[1], [2]], 1)
