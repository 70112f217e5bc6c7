"""The lowering table: one row per operation, which depends on flavour, version and architecture."""

from __future__ import annotations

import pytest

from irc.backends.tensorrt.lowering.collectives import OPERATIONS, is_native
from irc.backends.tensorrt.lowering.table import CHOICES, Choices, lowerings, rows
from irc.backends.tensorrt.target import Target
from irc.declare import REGISTRY
from irc.errors import Error
from irc.ops import Attention, Silu

RTX = Target.parse("tensorrt-rtx-1.7/sm_89")


@pytest.mark.parametrize("text", ["tensorrt-rtx-1.7/sm_89", "tensorrt-11.4/sm_90", "tensorrt-11.0"])
def test_every_operation_has_one_row_with_a_reason_and_a_source(text: str) -> None:
    found = rows(Target.parse(text))
    assert sorted({row.op for row in found}) == sorted(REGISTRY)
    assert [row.op for row in found] == sorted(row.op for row in found)
    assert len(found) == len(REGISTRY)
    assert all(row.choice and row.reason and row.source for row in found)


def test_the_row_of_attention_says_why_it_is_not_that_of_onnx() -> None:
    (row,) = [row for row in rows(RTX) if row.op == "attention"]
    assert "TRT_Attention" in row.choice and "nonpad_kv_seqlen" in row.reason


@pytest.mark.parametrize(
    ("text", "operation", "whole", "wanted", "native"),
    [
        ("tensorrt-11.0", "all_reduce", True, "auto", False),
        ("tensorrt-11.2", "all_reduce", True, "auto", True),
        ("tensorrt-11.2", "all_reduce", False, "auto", False),
        ("tensorrt-11.4", "all_gather", True, "auto", False),
        ("tensorrt-rtx-1.7", "all_reduce", True, "auto", False),
        ("tensorrt-rtx-1.7", "all_reduce", True, "native", True),
        ("tensorrt-rtx-1.7", "all_reduce", False, "native", False),
        ("tensorrt-11.2", "all_reduce", True, "plugin", False),
    ],
)
def test_native_collectives_are_for_whole_groups_of_good_versions(
    text: str, operation: str, whole: bool, wanted: str, native: bool
) -> None:
    assert is_native(operation, Target.parse(text), whole, wanted) is native  # pyright: ignore


@pytest.mark.parametrize("text", ["tensorrt-11.0", "tensorrt-11.4", "tensorrt-rtx-1.7"])
def test_something_is_known_of_every_collective(text: str) -> None:
    names = {row.op.removeprefix("collective_") for row in rows(Target.parse(text))}
    assert {*OPERATIONS} <= names


def test_the_first_choice_that_fits_wins() -> None:
    choices = Choices()
    for choice, since in (("new", (11, 3)), ("old", (0, 0))):
        register = choices.lower(
            Silu, choice=choice, reason="-", source="-", since=since, flavour="tensorrt"
        )
        register(lambda e, op: "")
    fitting = {
        text: [each.choice for each in choices.of(Silu) if each.fits(Target.parse(text))]
        for text in ("tensorrt-11.4", "tensorrt-11.0", "tensorrt-rtx-1.7")
    }
    assert fitting == {
        "tensorrt-11.4": ["new", "old"],
        "tensorrt-11.0": ["old"],
        "tensorrt-rtx-1.7": [],
    }


def test_the_table_is_that_of_the_target() -> None:
    assert lowerings(RTX) is lowerings(Target.parse("tensorrt-rtx-1.7/sm_89"))
    assert lowerings(RTX).covers(Attention) and Attention in CHOICES.table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensort", "did you mean"),
        ("tensorrt-rtx-1.7/sm_90", "no engine is for sm_90; there are sm_75, "),
        ("tensorrt-11.4/sm_999", "no engine is for sm_999; there are .*sm_90, "),
        ("tensorrt-rtx-1.7/ada", "'ada' is no architecture"),
        ("tensorrt-rtx-1.7/", "'' is no architecture; write sm_89"),
        ("tensorrt-rtx-1.7/sm_89+", "'' is no architecture"),
        ("tensorrt-rtx-1.7.", "write it as"),
        ("tensorrt-10.3", "needs tensorrt 11.0 or newer"),
        ("", "write it as"),
    ],
)
def test_bad_targets(text: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        Target.parse(text)


@pytest.mark.parametrize("text", ["tensorrt-rtx-1.7/sm_80+sm_89", "tensorrt-11.4/sm_90"])
def test_targets_read_back(text: str) -> None:
    assert str(Target.parse(text)) == text


def test_a_version_may_be_as_long_as_libraries_have_it() -> None:
    assert str(Target.parse("tensorrt-rtx-1.7.1.116/sm_89")) == "tensorrt-rtx-1.7/sm_89"
