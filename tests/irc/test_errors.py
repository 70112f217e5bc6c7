"""Suggestions for mistyped names."""

import pytest

from irc.errors import did_you_mean

OPTIONS = ("--outside", "--output", "--plan", "--set", "--dims", "--no-build", "--random-weights")
NAMES = (
    "qwen2",
    "qwen3",
    "fuse-gated-mlp",
    "f16",
    "f32",
    "model.embed_tokens.weight",
    "B",
    "x",
    "full",
    "mul",
)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--dmis", "--dims"),
        ("--dim", "--dims"),
        ("--DIMS", "--dims"),
        ("--otuput", "--output"),
        ("--random", "--random-weights"),
        ("Qwen3", "qwen3"),
        ("fuse-mlp", "fuse-gated-mlp"),
        ("fp16", "f16"),
        ("model.embed.weight", "model.embed_tokens.weight"),
        ("b", "B"),
        ("xx", "x"),
        ("mull", "mul"),
        *[(word, None) for word in ("--quantize", "--seed", "--ranks", "--build", "--tp")],
        *[(word, None) for word in ("qwen3_moe", "bf8", "y", "4", "", "-")],
    ],
)
def test_only_similar_names_are_suggested(typed: str, meant: str | None) -> None:
    expected = "" if meant is None else f"; did you mean {meant!r}?"
    assert did_you_mean(typed, OPTIONS + NAMES) == expected


def test_the_other_advice() -> None:
    assert did_you_mean("foo", ["bar"], "load it") == "; load it"
    assert did_you_mean("baz", ["bar"], "load it") == "; did you mean 'bar'? Otherwise load it"
