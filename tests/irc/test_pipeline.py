"""Pipeline text: reading, printing and its errors; options; passes from files and packages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irc.passes
from irc.errors import Error, TextError
from irc.extensions.entry_points import load_installed
from irc.ir.core import Module
from irc.pipeline import (
    PASSES,
    Pass,
    Pipeline,
    Stats,
    describe_options,
    load_file,
    parse_pipeline,
    register,
    run_pipeline,
)
from irc.pipeline.text import extends_default
from irc.text import parse_module
from tests.installed import install
from tests.user_code import restored_registries

assert irc.passes

TEXT = "module @m { func @f(%x: f32[B]) -> (f32[B]) { %a = neg %x : f32[B] return %a } }"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def options() -> type[Pass]:
    @register("everything")
    class Everything(Pass):
        """One option of each type."""

        scheme: str
        group: int = 128
        scale: float = 1.0
        fast: bool = False
        exclude: list[str] = []  # type: ignore[assignment]  # noqa: RUF012
        sizes: tuple[int, ...] = ()
        limit_to: str | None = None

        def run(self, module: Module, stats: Stats) -> None:
            stats.count("ran")

    return Everything


def only(text: str) -> Any:
    (found,) = parse_pipeline(text)
    return found


def test_options_of_every_type(options: type[Pass]) -> None:
    found = only(
        'everything{scheme="w4a16-awq", group=64, scale=2, fast, exclude=["lm_head", "a"], '
        'sizes=[1, -2], limit-to="x"}'
    )
    assert (found.scheme, found.group, found.fast) == ("w4a16-awq", 64, True)
    assert found.scale == 2.0 and type(found.scale) is float
    assert (found.exclude, found.sizes, found.limit_to) == (["lm_head", "a"], (1, -2), "x")


def test_defaults_words_and_layout(options: type[Pass]) -> None:
    found = only("\n everything {\n scheme = fp8 , fast = false, limit_to=none,\n} ")
    assert (found.scheme, found.group, found.fast, found.limit_to) == ("fp8", 128, False, None)
    assert str(found) == 'everything{scheme="fp8"}'


def test_a_pipeline_prints_back() -> None:
    assert parse_pipeline("  ") == Pipeline() and str(Pipeline()) == "" and not len(Pipeline())
    text = 'inline, expand{ops=["gated_mlp"]}, dce'
    assert str(parse_pipeline(text)) == text
    assert parse_pipeline(text + ",") == parse_pipeline(text)


def of_backend() -> list[Pass]:
    """Some passes, of which one comes twice."""
    return list(parse_pipeline("cse, fold, cse, dce"))


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("default", "cse, fold, cse, dce"),
        (" default , inline", "cse, fold, cse, dce, inline"),
        ('default, after cse: expand{ops=["gated_mlp"]}', 'cse, fold, cse, X, dce'),
        ('default, before cse: expand{ops=["gated_mlp"]},', 'X, cse, fold, cse, dce'),
        ("default, without cse", "fold, dce"),
        ("default, after dce: inline, after inline: cse", "cse, fold, cse, dce, inline, cse"),
        ("dce, after dce: cse, fold", "dce, cse, fold"),
    ],
)  # fmt: skip
def test_a_text_changes_the_default(text: str, passes: str) -> None:
    made = str(parse_pipeline(text, of_backend))
    assert made == passes.replace("X", 'expand{ops=["gated_mlp"]}')
    assert extends_default(text) == ("default" in text)


VALUES = st.fixed_dictionaries(
    {"scheme": st.text()},
    optional={
        "group": st.integers(),
        "scale": st.floats(allow_nan=False),
        "fast": st.booleans(),
        "exclude": st.lists(st.text()),
        "sizes": st.lists(st.integers()).map(tuple),
        "limit_to": st.none() | st.text(),
    },
)


def test_every_value_reads_back(options: type[Pass]) -> None:
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on busy machines
    @given(st.lists(VALUES, max_size=3))
    def check(values: list[dict[str, Any]]) -> None:
        pipeline = Pipeline(tuple(options(**v) for v in values))
        assert parse_pipeline(str(pipeline)) == pipeline

    check()


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("dce, fuse-gated-mpl", 6, "did you mean 'fuse-gated-mlp'?"),
        ("dce cse", 5, "expected ',' or '{' after the pass, found 'cse'"),
        ("dce,, cse", 5, "expected the name of a pass, found ','"),
        ("7", 1, "expected the name of a pass, found '7'"),
        ("dce{x=1}", 5, "dce has no option 'x'"),
        ("everything", 1, "everything requires the option scheme: a string"),
        ('everything{shceme="a"}', 12, "has no option 'shceme'; did you mean 'scheme'?"),
        ('everything{scheme="a", scheme="b"}', 24, "scheme is set twice"),
        ("everything{scheme=7}", 19, "everything: scheme: 7 is not a string"),
        ("everything{scheme}", 12, "everything: scheme: true is not a string"),
        ("everything{group=1.5}", 18, "everything: group: 1.5 is not an integer"),
        ("everything{group=true}", 18, "everything: group: true is not an integer"),
        ('everything{scale="a"}', 18, 'everything: scale: "a" is not a number'),
        ("everything{fast=1}", 17, "everything: fast: 1 is not true or false"),
        ('everything{exclude="a"}', 20, '"a" is not a list such as ["a", "b"]'),
        ("everything{exclude=[1]}", 20, '1 is not a list such as ["a", "b"]'),
        ("everything{sizes=[1, [2]]}", 22, "a list holds no lists"),
        ("everything{sizes=[1 2]}", 21, "expected ',' or ']', found '2'"),
        ("everything{limit-to=3}", 21, "3 is not a string or none"),
        ("everything{scheme=none}", 19, "none is not a string"),
        ("everything{scheme=", 19, "expected a value, found the end"),
        ('everything{scheme="a', 19, "does not end in its line"),
        ('everything{scheme="\\q"}', 19, "cannot read the string"),
        ("everything{scheme=a b}", 21, "expected ',' or '}', found 'b'"),
        ("everything{", 12, "expected the name of an option, found the end"),
        ("default, cse", 1, "is the pipeline of a backend, for irc compile --pipeline"),
        ("cse, default", 6, "no pass called 'default'"),
        ("dce, after cze: fold", 12, "has no such pass, but dce"),
        ("cse, dce, before cze: fold", 18, "but cse, dce; did you mean 'cse'?"),
        ("without cse", 9, "the pipeline has no such pass, but no pass"),
        ("cse, after cse fold", 16, "expected ':', found 'fold'"),
        ("cse, after cse: fald", 17, "no pass called 'fald'"),
        ("cse, after: fold", 6, "no pass called 'after'"),
        ("expand{ops=[mul]}", 1, "expand: mul is not composite, so it has no expansion"),
    ],
)
def test_errors_point_at_the_text(
    options: type[Pass], text: str, column: int, message: str
) -> None:
    with pytest.raises(TextError) as caught:
        parse_pipeline(text)
    assert message in caught.value.message
    assert caught.value.column == column
    assert str(caught.value).splitlines()[-1] == "  " + " " * (column - 1) + "^"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dce", {}, r"a pass called 'dce' is registered already, by irc\.passes\.dce"),
        ("odd", {"table": dict[str, int]}, "pass odd: option table: an option is bool, int, float"),
        (
            "late",
            {"group": int, "scheme": str},
            "pass late: non-default argument 'scheme' follows default",
        ),
    ],
)
def test_wrong_passes_are_not_registered(name: str, options: dict[str, Any], message: str) -> None:
    before = dict(PASSES)
    fields = {"__annotations__": options, "__module__": __name__}
    defaults = {"group": 128} if "group" in options else {}
    with pytest.raises(Error, match=message):
        register(name)(type("Wrong", (Pass,), fields | defaults))
    assert before == PASSES


def test_options_are_described(options: type[Pass]) -> None:
    assert describe_options(options) == [
        ("scheme", "a string", "", ""),
        ("group", "an integer", "128", ""),
        ("scale", "a number", "1.0", ""),
        ("fast", "true or false", "false", ""),
        ("exclude", 'a list such as ["a", "b"]', "[]", ""),
        ("sizes", "a list such as [1, 2]", "[]", ""),
        ("limit-to", "a string or none", "none", ""),
    ]


PASS_FILE = """
from irc.ops import Exp
from irc.pipeline import Pass, register
from irc.rewrite import P, apply_rules, rule

@rule(P.neg("x"))
def to_exp(x):
    return Exp(x)

@register("neg-to-exp")
class NegToExp(Pass):
    def run(self, module, stats):
        stats.update(apply_rules(module, [to_exp]))
"""


def test_passes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PASS_FILE, encoding="utf-8")
    assert load_file(path) == ["neg-to-exp"]
    assert load_file(path) == ["neg-to-exp"]  # a second time changes nothing
    module = parse_module(TEXT)
    (step,) = run_pipeline(module, "neg-to-exp")
    assert step.stats["to_exp"] == 1 and "exp %x" in str(module)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("bad.py", "\n1 / 0\n", r"bad.py:2: ZeroDivisionError: division by zero"),
        ("bad.py", "\n\ndef f(:\n", r"bad.py:3:7: error: not Python"),
        ("bad.py", "x = 1\n", r"bad.py registers no pass, operation, .* lowering; put @register"),
        ("bad.py", PASS_FILE + "import nowhere_at_all\n", r"bad.py:14: ModuleNotFoundError"),
        ("bad.py", "import irc\nirc.rewrite.P.silo()\n", "bad.py:2: no operation called 'silo'"),
        ("bad.py", "import sys\nsys.exit(0)\n", r"bad.py:2: SystemExit"),
        ("bad.py", None, "there is no file"),
        ("bad.txt", "", r"not a Python file; its name must end in \.py"),
    ],
)
def test_a_file_that_fails_registers_nothing(
    tmp_path: Path, name: str, source: str | None, message: str
) -> None:
    path = tmp_path / name
    if source is not None:
        path.write_text(source, encoding="utf-8")
    before = list(PASSES)
    with pytest.raises(Error, match=message):
        load_file(path)
    assert list(PASSES) == before


def test_passes_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, PASS_FILE, "irc_test_good", "irc.passes")
    assert str(parse_pipeline("neg-to-exp")) == "neg-to-exp"
    install(monkeypatch, tmp_path, "1 / 0", "irc_test_bad", "irc.passes")
    with pytest.raises(Error, match=r"irc_test_bad offers as irc\.passes, does not load: Zero"):
        load_installed("irc.passes")
