"""Texts that are built to take long: time is linear, or a limit refuses them."""

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.errors import Error, TextError
from tests.fresh import fresh

EMPTY = "module @m {\n  func @main(%x: f32[4]) -> (f32[4]) {\n    return %x\n  }\n}\n"
MANY = 1_000_000


def results(count: int) -> str:
    """A function of `count` equal results."""
    types, values = ", ".join(["f32[4]"] * count), ", ".join(f"%y{i}" for i in range(count))
    ops = "".join(f"    %y{i} = neg %x : f32[4]\n" for i in range(count))
    return EMPTY.replace("-> (f32[4])", f"-> ({types})").replace(
        "    return %x", f"{ops}    return {values}"
    )


def calls(functions: int, each: int) -> str:
    """Functions of which each calls the one before it `each` times."""
    text = ["module @m {\n  func @f0(%x: f32[4]) -> (f32[4]) {\n    %y = neg %x : f32[4]"]
    for i in range(1, functions):
        text.append(f"    return %y\n  }}\n  func @f{i}(%x: f32[4]) -> (f32[4]) {{")
        text += [f"    %z{n} = call %x {{callee=@f{i - 1}}} : f32[4]" for n in range(each - 1)]
        text.append(f"    %y = call %x {{callee=@f{i - 1}}} : f32[4]")
    return "\n".join([*text, "    return %y\n  }\n}\n"])


@pytest.mark.timeout(100)  # seconds, of which it takes one; the square of the length takes hours
@pytest.mark.parametrize("part", [" ", "\n", "\t\n"])
def test_blanks_at_the_end(part: str) -> None:
    assert str(irc.parse(EMPTY + part * MANY)) == EMPTY
    with pytest.raises(TextError, match="expected } after return, found the end"):
        irc.parse(EMPTY.rstrip("}\n ") + part * MANY)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("part", ["a", '\\"', "a[", "a[]{", "(", "//", "//\n", "a.", "1e", "-"])
@pytest.mark.parametrize("start", ['file @a = "', "weight @w : ", 'file @a = "b" '])
def test_a_part_repeated(start: str, part: str) -> None:
    with pytest.raises(TextError) as caught:
        irc.parse(f"module @m {{ {start}{part * MANY}")
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(100)
def test_an_unclosed_string_of_a_pipeline() -> None:
    with pytest.raises(TextError, match="does not end in its line"):
        irc.run_passes(irc.parse(EMPTY), 'shard{mesh="' + '\\"' * MANY)


def test_the_deepest_calls(tmp_path: Path) -> None:
    x = fresh().standard_normal(4).astype("f")
    module = irc.parse(calls(101, 1))
    (y,) = irc.evaluate(module, {"x": x}).values()
    np.testing.assert_array_equal(y, -x)
    (y,) = irc.compile(module, tmp_path / "out").run({"x": x}).values()
    np.testing.assert_array_equal(y, -x)
    irc.run_passes(module, "inline")
    assert len(list(module.ops())) == 2
    with pytest.raises(TextError, match="@f101 has calls nested 101 deep; at most 100"):
        irc.parse(calls(102, 1))


def test_calls_that_double() -> None:
    irc.run_passes(irc.parse(calls(12, 2)), "inline")
    with pytest.raises(TextError, match=r"the calls of @f\d+ run \d+ operations; at most 250000"):
        irc.parse(calls(40, 2))


def test_a_call_of_a_later_function() -> None:
    module = irc.parse(calls(3, 1))
    module.functions = dict(reversed(module.functions.items()))
    with pytest.raises(Error, match="@f2 calls @f1, which is not defined before it"):
        irc.run_passes(module, "")


@pytest.mark.timeout(200)
def test_many_results() -> None:
    irc.run_passes(module := irc.parse(results(2000)), "cse")
    assert len(list(module.ops())) == 2
    with pytest.raises(Error, match="return has 20000 operands; at most 10000"):
        irc.run_passes(irc.parse(results(20_000)), "cse")
