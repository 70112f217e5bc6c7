"""The guides of folders: what they list is there, what they show works as printed."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.backends
import irc.passes
from irc.backends.base import Backend
from irc.extensions.user_files import forget, name_of
from irc.frontends import layers
from irc.ir.core import Function
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Linear, Pad
from irc.pipeline import PASSES, load_file
from irc.text import print_module
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.layout import LINKED, ROOT
from tests.user_code import restored_registries

# The folders whose guide has a table of their files, and what no table lists.
FOLDERS = (
    "irc",
    "frontends",
    "backends/cuda",
    "backends/ranks",
    "backends/tensorrt/plugins",
    "backends/tensorrt/runtime",
)
GUIDES = sorted(
    path.relative_to(ROOT)
    for folder in (".", "irc", "passes", "frontends", "backends", "benchmarks", "examples")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
NO_ROW = {*LINKED, "__init__", "__main__", "__pycache__"}
LAYER = """module @m dims(B=1:2:4) {
  weight @gate : f32[128, 8] = random("gate", 1, 0.1)
  weight @up : f32[128, 8] = random("up", 1, 0.1)
  weight @bias : f32[128] = random("bias", 1, 0.1)
  weight @down : f32[8, 128] = random("down", 1, 0.1)
  weight @short : f32[8] = random("short", 1, 0.1)
  func @forward(%x: f32[B, 8]) -> (y: f32[B, 8]) {
    %gate = linear %x, @gate : f32[B, 128]
    %act = silu %gate : f32[B, 128]
    %up = linear %x, @up : f32[B, 128]
    %h = mul %act, %up : f32[B, 128]
    %biased = linear %x, @up, bias=@bias : f32[B, 128]
    %sum = add %h, %biased : f32[B, 128]
    %y = linear %sum, @down, bias=@short : f32[B, 8]
    return %y
  }
}
"""


def guide(folder: str) -> str:
    """The text of a folder's guide."""
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


def indented(folder: str, start: str) -> str:
    """The indented block of a folder's guide that begins with `start`."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", guide(folder), re.MULTILINE)
    blocks = [textwrap.dedent(block) for block in found]
    (block,) = [b.strip("\n") + "\n" for b in blocks if b.strip("\n").startswith(start)]
    return block


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_of_files_is_complete(folder: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", guide(folder).partition("| file |")[2], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    there = {
        path.stem
        for path in (ROOT / folder).iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.iterdir()))
    }
    assert len(named) == len(set(named))
    assert {name.removesuffix(".py").rstrip("/") for name in named} == there - NO_ROW


@pytest.mark.parametrize("path", GUIDES, ids=str)
def test_the_files_that_a_guide_names_and_links_are_there(path: Path) -> None:
    text, folder = (ROOT / path).read_text(encoding="utf-8"), (ROOT / path).parent
    below = {file.name for base in (folder, ROOT / "tests") for file in base.rglob("*.py")}
    for name in re.findall(r"`([a-z_0-9/.]+\.py)`", text):
        assert name in below or (folder / name).exists() or (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (folder / target).exists(), target


def test_the_module_of_the_language_guide_is_a_module() -> None:
    text = indented("irc", "module @demo")
    module = irc.parse(text)
    verify(module)
    assert print_module(module, locs=True) == text


def test_the_operation_of_the_language_guide_works(tmp_path: Path) -> None:
    path = tmp_path / "double.py"
    path.write_text(indented("irc", "from irc import Op"))
    text = "module @m { func @f(%x: f32[2]) -> (f32[2]) { %y = double %x : f32[2] return %y } }"
    with restored_registries():
        load_file(path)
        outputs = irc.evaluate(irc.parse(text), {"x": np.array([1, 3], np.float32)})
        assert outputs["result0"].tolist() == [2, 6]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_script_of_the_frontends_guide_compiles(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "scorer.py"
    path.write_text(indented("frontends", "import irc"))
    flags = ["--random-weights", "0", "--dtype", dtype, "--set", "hidden=8"]
    assert "scorer" in works("compile", str(path), *flags, "-o", str(tmp_path / "out")).out


@pytest.mark.parametrize(
    ("file", "name", "made", "reported"),
    [
        ("my_fusion.py", "my-pass", "gated_mlp", r"%2 = gated_mlp .*gated_mlp +2  of 2 tries"),
        (
            "my_walk.py",
            "separate-bias",
            "add %0, @bias",
            r"layers_0 = add .*two_tower.py:.*it has fewer than 128 features.*separated +2",
        ),
    ],
)
def test_the_passes_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, made: str, reported: str
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        rf'```python\n((?:(?!```).)*@register\("{name}"\).*?)```', guide("passes"), re.S
    )
    (block,) = [block for block in blocks if name != "my-pass" or "GatedMlp" in block]
    Path("examples").symlink_to(ROOT / "examples")
    Path("layer.irc").write_text(LAYER)
    Path(file).write_text(block)
    (command,) = re.findall(rf"^    irc (opt .*{file}.*)$", guide("passes"), re.M)
    with restored_registries():
        shown = works(*shlex.split(command))
        answer = works("opt", "layer.irc", "--load", file, "--passes", f"{name}, dce")
        kept = works("opt", "layer.irc", "--load", file, "--passes", name, "--limit", f"{name}=0")
    assert made in answer.out and made not in LAYER
    assert kept.out == LAYER
    assert re.search(reported, shown.err, re.DOTALL)
    x = fresh().normal(size=(3, 8)).astype(np.float32)
    before, after = (irc.evaluate(irc.parse(t), {"x": x})["y"] for t in (LAYER, answer.out))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_the_option_of_the_pass_of_the_guide_is_one_of_irc_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r'```python\n((?:(?!```).)*"separate-bias".*?)```', guide("passes"), re.S)
    (command,) = re.findall(r"^    irc (compile .*my_walk.py.*)$", guide("passes"), re.M)
    Path("examples").symlink_to(ROOT / "examples")
    Path("my_walk.py").write_text(block)
    with restored_registries():
        passes = works(*shlex.split(command), "--json").json["passes"]
        names = [each["pass"].partition("{")[0] for each in passes]
        assert names[:2] == ["inline", "separate-bias"]
        assert "{least=64}" in passes[1]["pass"] and "separated" in passes[1]["did"]
        assert "--separate-biases" in works("passes", "separate-bias", "--load", "my_walk.py").out
        said = refused(*shlex.split(command), "--pipeline", "cse")
        assert "write separate-bias{least=...} there" in said


def test_the_backend_of_the_guide_has_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(.*?class MyBackend.*?)```", guide("backends"), re.S)
    (tmp_path / "guide_backend.py").write_text(f"{block}\n\nbackend = MyBackend()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(irc.backends.OWN, "mine", ("guide_backend", "backend"))
    out = works("compile", "--help").out
    assert "--backend mine:" in out and "--unroll N" in out
    words = ("compile", ROOT / "examples" / "two_tower.py", "--dry-run", "--unroll")
    assert "0 is less than 1" in refused(*words, "0", status=2)
    said = refused(*words, "2", "--random-weights", "0")
    assert "the backend onnx has no option unroll: --unroll is for --backend mine" in said


def test_the_backend_of_the_guide_has_the_interface() -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", guide("backends"), re.DOTALL):
        exec(block, scope)
    made = scope["MyBackend"]()  # a TypeError if an abstract member is missing
    for name in Backend.__abstractmethods__:
        assert parameters(getattr(type(made), name)) == parameters(getattr(Backend, name))
    table, x = scope["TABLE"], Function("f", [("x", TensorType("f32", (4,)))]).args[0]
    assert table.covers(Linear) and table.find(Pad(x, before=(1,), after=(1,))) is scope["pad"]
    assert "only zeros" in table.reason(Pad(x, before=(1,), after=(1,), value=2.0))


def test_the_lowering_of_the_guide_is_used(tmp_path: Path) -> None:
    path = tmp_path / "gelu.py"
    path.write_text(indented("backends/tensorrt", "from irc import ops"))
    with restored_registries():
        for version, chosen in (("11.4", True), ("11.1", False)):
            rows = works("ops", "gelu", "--target", f"tensorrt-{version}/sm_90", "--load", path).out
            assert ("one kernel with the product before it" in rows) == chosen


def test_the_scheme_of_the_guide(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", guide("passes/quantize"), re.S)
    path, module = tmp_path / "my_scheme.py", irc.parse(LAYER)
    path.write_text(block)
    load_file(path)
    try:
        irc.run_passes(module, 'quantize{scheme="w4a8", group=8}, dce')
    finally:
        forget(name_of(path))
    assert {weight.type.dtype for weight in module.weights.values()} == {"i4", "f32"}


def test_the_passes_that_the_guide_lists_are_those_that_are_registered() -> None:
    table = guide("passes").partition("## The passes")[2].partition("##")[0]
    listed = re.findall(r"^\| `([a-z-]+)(?:\{.*?\})?` \|", table, re.MULTILINE)
    own = {name for name, cls in PASSES.items() if cls.__module__.startswith("irc.passes")}
    assert sorted(listed) == sorted(own)


def test_the_table_of_layers_is_that_of_the_code() -> None:
    public = [each for name, each in vars(layers).items() if name[0] != "_" and callable(each)]
    table = "\n".join(map(layer_row, public))
    assert table in guide("frontends"), f"the guide needs this table:\n{table}"


def layer_row(layer: Callable[..., Any]) -> str:
    """A row of the table: how a layer is made; how it is called, and with what result."""
    calls = [layer.__dict__[name] for name in ("forward", "__call__") if name in layer.__dict__]
    called = f"`({parameters(calls[0])})`: " if calls else ""
    text = inspect.getdoc(calls[0] if calls else layer) or ""
    sentence = re.split(r"\.(?=\s|$)", text, maxsplit=1)[0].replace("\n", " ").replace("|", r"\|")
    return f"| `{layer.__name__}({parameters(layer)})` | {called}{sentence} |"


def parameters(function: Callable[..., Any]) -> str:
    """The parameters with their defaults, as in the source."""
    found = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in found if p.name not in ("self", "_cls")]
    return str(inspect.Signature(plain))[1:-1].replace("'", '"')
