"""A short run of the text fuzzer."""

from tests.fresh import fresh
from tests.fuzz.mutate_text import fuzz


def test_mutated_texts_are_read_or_refused() -> None:
    seed = int(fresh(50).integers(10**9))
    outcomes = fuzz(3000, seed)
    assert outcomes["failed"] == 0, f"seed {seed}"
    assert outcomes["read"] > 30 and outcomes["refused"] > 1000
