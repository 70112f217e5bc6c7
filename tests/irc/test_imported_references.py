"""What references of other libraries' layouts refuse; their values are in test_references.py."""

from collections.abc import Callable

import pytest

import irc
from irc.weights import RandomRef, Ref, RepeatedRef, SortingRef, TakenRef, UnpackedRef, ZerosRef
from irc.weights.checkpoint import Reader

WORDS = ZerosRef((2, 8), "i32")
INDICES = RandomRef("i", 1, 9.0, (8,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnpackedRef(WORDS, "gptq", "u4", (16, 8)), "no packing called 'gptq'; there are"),
        (lambda: UnpackedRef(WORDS, "rows", "f16", (16, 8)), r"not f16\[16, 8\]"),
        (lambda: UnpackedRef(WORDS, "rows", "u4", (16,)), r"not u4\[16\]"),
        (
            lambda: UnpackedRef(WORDS, "rows", "u4", (17, 8)),
            r"needs words \[3, 8\], but .*\[2, 8\]",
        ),
        (lambda: UnpackedRef(WORDS, "awq", "u4", (16, 8)), r"needs words \[16, 1\], but"),
        (lambda: RepeatedRef(WORDS, (2, 1), (5, 8)), r"does not fit .* has \[2, 8\]"),
        (lambda: RepeatedRef(WORDS, (2,), (4,)), r"does not fit .* has \[2, 8\]"),
        (lambda: RepeatedRef(WORDS, (0, 1), (0, 8)), "does not fit"),
        (lambda: SortingRef(WORDS), r"has \[2, 8\]; expected a vector"),
        (lambda: TakenRef(WORDS, WORDS, 0), "expected a vector of indices"),
        (lambda: TakenRef(WORDS, SortingRef(INDICES), 2), "expected a vector of indices"),
        (lambda: TakenRef(WORDS, SortingRef(INDICES), 0), "indices 0 to 7; expected 0 to 1"),
    ],
)
def test_refusals(make: Callable[[], Ref], message: str) -> None:
    with pytest.raises(irc.Error, match=message):
        Reader(irc.Module("m")).read(make())
