"""The lowering table: one row per operation, which depends on flavour, version and architecture."""

from __future__ import annotations

import pytest

from irc.backends.tensorrt.lowering.table import Choices, rows
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.ir.declare import REGISTRY
from irc.ops import Silu


@pytest.mark.parametrize("text", ["tensorrt-rtx-1.7/sm_89", "tensorrt-11.4/sm_90", "tensorrt-11.0"])
def test_every_operation_has_one_row_with_a_reason_and_a_source(text: str) -> None:
    found = rows(Target.parse(text))
    assert sorted({row.op for row in found}) == sorted(REGISTRY)
    assert [row.op for row in found] == sorted(row.op for row in found)
    assert len(found) == len(REGISTRY)
    assert all(row.choice and row.reason and row.source for row in found)


def test_the_first_choice_that_fits_wins() -> None:
    choices = Choices()
    for choice, since in (("new", (11, 3)), ("old", (0, 0))):
        register = choices.lower(
            Silu, choice=choice, reason="-", source="-", since=since, flavour="tensorrt"
        )
        register(lambda e, op: "")
    fitting = {
        text: getattr(choices.find(Silu, Target.parse(text)), "choice", None)
        for text in ("tensorrt-11.4", "tensorrt-11.0", "tensorrt-rtx-1.7")
    }
    assert fitting == {"tensorrt-11.4": "new", "tensorrt-11.0": "old", "tensorrt-rtx-1.7": None}


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


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("tensorrt-rtx-1.7/sm_80+sm_89", ""),
        ("tensorrt-11.4/sm_90", ""),
        ("tensorrt-rtx-1.7.1.116/sm_89", "tensorrt-rtx-1.7/sm_89"),
    ],
)
def test_targets_read_back(text: str, written: str) -> None:
    assert str(Target.parse(text)) == (written or text)
