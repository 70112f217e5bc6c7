"""The table of names: what it says of every function, class and argument is what calls do."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from irc.errors import Error
from irc.frontends.models import FAMILIES
from irc.frontends.tensorrt_llm import api
from irc.frontends.tensorrt_llm.api import RELEASES, Argument, Row
from irc.frontends.tensorrt_llm.context import current_session, new_session
from irc.frontends.tensorrt_llm.lint import lint_script
from irc.frontends.tensorrt_llm.script import run_script
from tests.layout import ROOT as TREE

GUIDE = TREE / "frontends" / "tensorrt_llm" / "names.md"
HEAD = """# Names of TensorRT-LLM's API

Written from `api.toml` by `python -m tests.frontends.tensorrt_llm.test_api`.

"""


def supported_rows(release: int) -> Iterator[tuple[str, Row]]:
    """The rows that a release has and irc supports, in a session of the release."""
    for path, row in api.rows().items():
        owner = path.rpartition(".")[0]
        statuses = [api.status(path)]
        if is_class(owner):
            statuses = [api.status(owner), api.noted(path) or api.SUPPORTED]
        if release in row.releases and all(status.kind == "supported" for status in statuses):
            yield path, row


def is_class(path: str) -> bool:
    return path.rpartition(".")[2][:1].isupper()


def arguments_of(row: Row, release: int) -> list[Argument]:
    by_position, by_keyword = row.of(release)
    return [*by_position, *by_keyword]


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_there_or_has_a_reason(release: int) -> None:
    with new_session(RELEASES[release]):
        names = [path for path, row in api.rows().items() if release in row.releases]
        plain = [path for path in names if not is_class(path.rpartition(".")[0])]
        assert not [path for path in plain if api.status(path).kind == "unknown"]
        missing: list[str] = []
        for path, _ in supported_rows(release):
            owner, _, name = path.rpartition(".")
            if is_class(owner) and not hasattr(api.find(owner), name):
                missing.append(path)
        assert not missing


@pytest.mark.parametrize("release", RELEASES)
def test_every_argument_is_implemented_or_has_a_reason(release: int) -> None:
    with new_session(RELEASES[release]):
        silent = [
            f"{path}({argument.name}=)"
            for path, row in supported_rows(release)
            for argument in arguments_of(row, release)
            if not api.call_of(path) or api.argument_status(path, argument.name).kind == "unknown"
        ]
        assert not silent


def test_every_reason_is_needed() -> None:
    needed = {name for _, name, _ in lacking_arguments()}
    needed |= {f"{path}.{name}" for path, name, _ in lacking_arguments()}
    noted = [name for what, name in api.notes() if what == "arguments"]
    assert not [name for name in noted if name not in needed]
    assert all(note.why for note in api.notes().values())


# -- calls


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_by_position_are_those_of_the_row(release: int) -> None:
    with new_session(RELEASES[release]):
        for path, row in supported_rows(release):
            call = api.call_of(path)
            if call is None or not row.arguments:
                continue
            by_position, by_keyword = row.of(release)
            values = {name: object() for name in call.taken}
            positional = [values.get(argument.name) for argument in by_position]
            named = {x.name: values[x.name] for x in by_keyword if x.name in values}
            taken = {n: values[n] for n in values.keys() & {*named, *(x.name for x in by_position)}}
            try:
                given = call.bind(tuple(positional), named)
            except Error as error:  # of another release, which has more
                assert "needs" in error.message
                continue
            assert {name: given[name] for name in taken} == taken, path
            with pytest.raises(Error, match=r"takes \d+ positional arguments"):
                call.bind((*positional, None), {})
            if not row.takes_any:
                with pytest.raises(Error, match="has no argument 'nothing_like_it'"):
                    call.bind(tuple(positional), named | {"nothing_like_it": 1})


@cache
def lacking_arguments() -> dict[tuple[str, str, str], int]:
    """(path, argument, kind of its reason) of what supported rows lack -> the latest release."""
    latest: dict[tuple[str, str, str], int] = {}
    for release in RELEASES:
        with new_session(RELEASES[release]):
            for path, row in supported_rows(release):
                for argument in arguments_of(row, release):
                    kind = api.argument_status(path, argument.name).kind
                    if kind != "supported":
                        latest[path, argument.name, kind] = release
    return latest


def noted_arguments(kind: str) -> list[tuple[str, str, int]]:
    """(path, argument, latest release) of every argument that is lacking for a kind of reason."""
    return [(*key[:2], release) for key, release in lacking_arguments().items() if key[2] == kind]


def bound(call: Any, name: str, value: object) -> dict[str, Any]:
    """The arguments of a call with one argument, as far as others are not needed."""
    try:
        return call.bind((), {name: value})
    except Error as error:
        if "needs" not in error.message:
            raise
        return {}


def test_refused_arguments_raise_the_sentence_that_lint_prints() -> None:
    for path, name, release in noted_arguments("refused"):
        with new_session(RELEASES[release]):
            call, why = api.call_of(path), api.argument_status(path, name).why
            with pytest.raises(Error, match="is not supported: ") as caught:
                bound(call, name, object())
            assert why in caught.value.message
            for value in (None, False):
                bound(call, name, value)


def test_arguments_without_effect_are_noted_once() -> None:
    for path, name, release in noted_arguments("without effect"):
        with new_session(RELEASES[release]):
            assert name not in bound(api.call_of(path), name, "something")
            notes = [note for note in current_session().notes if f": {name} has no effect" in note]
            assert len(notes) == 1, (path, name)


SCRIPT = """
import tensorrt_llm
from tensorrt_llm.functional import Tensor, allreduce, gpt_attention, softmax
from tensorrt_llm.layers import Attention, ColumnLinear
from tensorrt_llm.network import net_guard
import tensorrt as trt

builder = tensorrt_llm.Builder()
release = tensorrt_llm.__version__
network = builder.create_network()
with net_guard(network):
    x = Tensor(name="x", dtype=trt.float32, shape=[2, 4])
    {line}
    softmax(x, 1).mark_output("y", trt.float32)
builder.build_engine(network, builder.create_builder_config(precision="float32"))
"""


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("ColumnLinear(4, 4)(x, lora_runtime_params='adapter')", "0.16"),
        ("x.marc_output('y')", "0.16"),
        ("x.get_parent()", "0.16"),
        ("network.plugin_config.gpt_atention_plugin = 'float16'", "0.7"),
    ],
)
def test_lint_and_the_run_say_the_same_of_a_line(line: str, version: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(line=line))
    at = path.read_text().split("\n").index(f"    {line}") + 1
    faults = [
        use for use in lint_script(path, version).uses if use.status in ("refused", "unknown")
    ]
    assert [use.line for use in faults] == [at]
    with pytest.raises(Error) as caught:
        run_script(path, version=version)
    assert f"script.py:{at}" in str(caught.value)
    assert faults[0].status == "unknown" or faults[0].why in caught.value.message
    path.write_text(SCRIPT.format(line="pass"))
    assert lint_script(path, version).score == 1
    assert list(run_script(path, version=version).engines)


# -- what NVIDIA's sources say


@pytest.mark.skipif("IRC_TENSORRT_LLM_SOURCES" not in os.environ, reason="no sources are given")
@pytest.mark.parametrize("release", RELEASES)
def test_the_table_has_the_arguments_of_the_sources(release: int) -> None:
    folder = Path(os.environ["IRC_TENSORRT_LLM_SOURCES"]) / RELEASES[release] / api.ROOT
    if not folder.is_dir():
        pytest.skip(f"no sources of {RELEASES[release]}")
    for path, row in api.rows().items():
        signature = _signature(folder, path)
        if release not in row.releases or signature is None or not row.arguments:
            continue
        by_position, by_keyword = row.of(release)
        names = [each.name for each in by_position]
        assert names[: len(signature[0])] == signature[0][: len(names)], path
        assert {each.name for each in by_keyword} >= set(signature[1]), path


@cache
def parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # of escapes in its docstrings
        return ast.parse(file.read_text())


def _signature(folder: Path, path: str) -> tuple[list[str], list[str]] | None:
    """(arguments by position, by keyword only) in a source file; None where there is no such."""
    *parts, name = path.split(".")
    owner = parts.pop() if parts and is_class(".".join(parts)) else ""
    owner, name = (name, "__init__") if is_class(path) and not owner else (owner, name)
    file = folder.joinpath(*parts).with_suffix(".py")
    if not file.is_file():
        return None
    body = parsed(file).body
    if owner:
        classes = [each for each in body if isinstance(each, ast.ClassDef) and each.name == owner]
        body = classes[0].body if classes else []
    functions = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == name]
    if not functions:
        return None
    arguments = functions[-1].args
    by_position = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    decorators = {ast.unparse(each) for each in functions[-1].decorator_list}
    bound = bool(owner) and "staticmethod" not in decorators
    return by_position[int(bound) :], [each.arg for each in arguments.kwonlyargs]


# -- the guide


def guide_tables() -> str:
    """The tables of the guide: supported names by module, and reasons."""
    api.load()
    names: dict[str, set[str]] = {}
    with new_session():
        for path in api.declared():
            module, _, name = path.rpartition(".")
            if not is_class(module):
                names.setdefault(module, set()).add(name)
    parts = ["| module | supported names |\n|---|---|\n"]
    for module, several in sorted(names.items()):
        listed = " ".join(f"`{name}`" for name in sorted(several))
        parts.append(f"| `{module or api.ROOT}` | {listed} |\n")
    titles = {"without effect": "accepted without effect | why", "refused": "refused | instead"}
    forms = {"arguments": "`{}=`", "methods": "`.{}()`", "names": "`{}`"}
    for kind, title in titles.items():
        reasons: dict[str, list[str]] = {}
        for (what, name), note in api.notes().items():
            if note.kind == kind:
                reasons.setdefault(note.why, []).append(forms[what].format(name))
        parts.append(f"\n| {title} |\n|---|---|\n")
        parts += [f"| {' '.join(several)} | {why} |\n" for why, several in reasons.items()]
    return "".join(parts)


def test_folders_are_advised_for_the_families_that_irc_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice = "; or compile its folder of transformers: irc compile FOLDER"
    for name in ("GPTJForCausalLM", "GPTJConfig", "FalconModel"):
        assert api.status(f"models.{name}").why.endswith(advice)
    for name in ("MambaForCausalLM", "GPTLMHeadModel", "GPTModel", "QWenForCausalLM"):
        assert advice not in api.status(f"models.{name}").why
    monkeypatch.delitem(FAMILIES, ("gptj", "GPTJForCausalLM"))
    assert advice not in api.status("models.GPTJForCausalLM").why


def test_the_guide_has_the_table() -> None:
    assert GUIDE.read_text(encoding="utf-8") == HEAD + guide_tables()


if __name__ == "__main__":
    GUIDE.write_text(HEAD + guide_tables(), encoding="utf-8")
