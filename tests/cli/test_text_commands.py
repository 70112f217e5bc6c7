"""The commands that read and write text: show, opt, diff, ops, passes."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from irc.ir.declare import REGISTRY
from irc.text import parse_module
from tests.cli.conftest import MODULE
from tests.cli.runner import entries, irc, refused, works
from tests.layout import ROOT
from tests.models.golden import write_safetensors
from tests.user_code import restored_registries

PLAIN = re.sub(r" loc\(.*\)", "", MODULE)
MY_PASSES = '''
from dataclasses import replace
from irc import Pass, register

@register("test-shout")
class Shout(Pass):
    """Renames the module."""
    suffix: str = "_loud"
    def run(self, module, stats):
        module.name += self.suffix

@register("test-wrong")
class Wrong(Pass):
    def run(self, module, stats):
        module.weights["w"].ref = replace(module.weights["w"].ref, seed=2)

@register("test-broken")
class Broken(Pass):
    def run(self, module, stats):
        module.weights["w"].name = "v"
'''


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with restored_registries():
        yield


# ------------------------------------------------------------------ show


def test_show_prints_the_text(module: Path) -> None:
    assert works("show", module).out == PLAIN
    assert works("show", module, "--locs").out == MODULE
    assert works("show", "-", stdin=MODULE).out == PLAIN


def test_show_prints_one_scope(module: Path) -> None:
    lines = works("show", module, "--scope", "layers.0.mlp").out.splitlines()
    assert [line.split(" = ")[0].strip() for line in lines[2:-2]] == ["%again", "%sum"]
    assert "%two" in works("show", module, "--scope", "layers.0").out
    err = refused("show", module, "--scope", "layers.0.mpl")
    assert "no operation is in the scope 'layers.0.mpl'; did you mean 'layers.0.mlp'?" in err
    assert "at the top there are layers, head" in err


def test_show_counts(module: Path) -> None:
    stats = works("show", module, "--stats", "--json").json
    assert stats == {
        "name": "m",
        "functions": 1,
        "operations": 5,
        "weights": 1,
        "parameters": 32,
        "weight_bytes": 128,
        "by_operation": {"mul": 2, "add": 1, "linear": 1, "return": 1},
    }
    text = works("show", module, "--stats").out
    assert re.search(r"^weight_bytes +128 \(128 B\)$", text, re.MULTILINE)
    assert re.search(r"^  mul +2$", text, re.MULTILINE)
    assert works("show", module, "--json").json["text"] == PLAIN


def test_show_writes_a_page(module: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.html"
    assert works("show", module, "--html", path).out == ""
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert "layers.0.mlp" in page
    assert "http" not in page, "the page has no links"
    module.write_text(MODULE.replace("layers.0.mlp", "<script>alert(1)</script>"))
    works("show", module, "--html", path)
    assert "<script>" not in path.read_text()


def test_input_that_is_no_module(module: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert f"compile it first: irc compile {tmp_path} -o DIR" in refused("show", tmp_path)
    module.write_bytes(b"module \xff")
    says = " is not text in UTF-8 (byte 7 is wrong)"
    assert f"m.irc{says}" in refused("show", module)
    assert f"<stdin>{says}" in refused("show", "-", stdin=b"module \xff")
    assert "<stdin>:1:1: error: expected" in refused("opt", stdin="")
    module.write_text(MODULE.replace("f32[B, 4]) -> ", "f32[Q, 4]) -> "))
    assert "Q" in refused("show", module)


# ------------------------------------------------------------------ opt


def test_opt_without_passes_verifies_and_prints(module: Path) -> None:
    assert works("opt", module).out == PLAIN
    assert works("opt", stdin=MODULE).out == PLAIN
    assert works("opt", module, "--locs").out == MODULE
    assert refused("opt", stdin=MODULE.replace("-> (y: f32[B, 8])", "-> (y: f32[B, 9])"))


def test_opt_runs_passes_and_reports_on_standard_error(module: Path, tmp_path: Path) -> None:
    words = ["opt", module, "--passes", "cse, dce", "--dump-dir", tmp_path / "d"]
    answer = works(*words, "--diff", "--stats", "--time", "--why-not", "cse")
    assert "%again" not in answer.out and "merged" not in answer.out
    assert "add %two, %two" in str(parse_module(answer.out))
    reports = ["-    %again = mul", "merged +1", "ms +5 -> 4 ops +cse", "cse: no rule nearly"]
    assert all(re.search(each, answer.err) for each in reports)
    assert entries(tmp_path / "d") == ["000-input.irc", "001-cse.irc", "002-dce.irc"]
    assert works("show", tmp_path / "d" / "001-cse.irc").out.count("mul") == 1
    assert "%again" in works("opt", module, "--passes", "cse", "--limit", "cse=0").out


@pytest.fixture
def loaded(tmp_path: Path) -> list[str]:
    """The option that loads MY_PASSES."""
    (tmp_path / "mine.py").write_text(MY_PASSES)
    return ["--load", str(tmp_path / "mine.py")]


def test_opt_checks_numerics(module: Path, loaded: list[str]) -> None:
    works("opt", module, "--passes", "cse", "--check-numerics")
    words = ["opt", module, *loaded, "--passes", "test-wrong"]
    works(*words)
    assert "test-wrong changes the result y" in refused(*words, "--check-numerics")


LOSSY = """
from irc import Pass, register
from irc.ops import Sub
from irc.rewrite import P, apply_rules, rule

@rule(P.add("x", "y"))
def confuse(x, y):
    return Sub(x, y)

@register("test-confuse")
class Confuse(Pass):
    def run(self, module, stats):
        stats.update(apply_rules(module, [confuse]))
"""


def commands(text: str) -> list[list[str]]:
    """The commands of irc in a text, without the name of the program."""
    return [shlex.split(line)[1:] for line in re.findall(r"irc opt .*", text)]


def test_a_reproducer_keeps_limits_checks_and_weight_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "confuse.py").write_text(LOSSY)
    arrays = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    (tmp_path / "given").mkdir()
    write_safetensors(tmp_path / "given" / "w.safetensors", arrays)
    body = [
        *("%a = add @w, %x", "%b = add %a, %a", "%again = add @w, %x"),
        *("%c = add %b, %again", "%d = mul %c, @v", "%more = mul %c, @v", "%e = mul %d, %more"),
    ]
    text = 'module @m {\n  file @f = "w.safetensors"\n'
    text += "".join(f'  weight @{name} : f32[4] = @f["{name}"]\n' for name in arrays)
    text += "  func @f(%x: f32[4]) -> (y: f32[4]) {\n"
    text += "".join(f"    {op} : f32[4]\n" for op in body) + "    return %e\n  }\n}\n"
    (tmp_path / "given" / "m.irc").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["opt", tmp_path / "given" / "m.irc", "--load", "confuse.py", "--check-numerics"]
    words += ["--limit", "cse=1", "--limit", "test-confuse=1", "--dump-dir", tmp_path / "dumps"]
    err = refused(*words, "--passes", "cse, test-confuse, cse")
    (again,) = commands(err)
    made = ["--check-numerics", "--limit", "test-confuse=1", "--limit", "cse=0"]
    assert again[-7:] == [*made, "--passes", "test-confuse, cse"]
    monkeypatch.chdir(tmp_path.parent)
    assert "test-confuse changes the result y" in refused(*again)
    dump = (tmp_path / "dumps" / "001-cse.irc").read_text()
    (made_by,) = commands(dump)
    assert made_by[-5:] == ["--check-numerics", "--limit", "cse=1", "--passes", "cse"]
    monkeypatch.chdir(tmp_path / "dumps")
    assert works(*made_by).out == dump.partition("\n")[2]


@pytest.mark.parametrize("words", [["opt", "--passes"], ["compile", "--dry-run", "--pipeline"]])
def test_passes_are_verified(words: list[str], module: Path, loaded: list[str]) -> None:
    words += ["test-broken", *loaded]
    err = refused(*words, module)
    assert "weight @v is filed under the name 'w'" in err
    assert "the module was valid before the pass test-broken" in err
    works(*words, module, "--no-verify")


def test_a_pass_of_the_user(module: Path, loaded: list[str]) -> None:
    assert "@m_loud" in works("opt", module, *loaded, "--passes", "test-shout").out
    assert re.search(r"test-shout +Renames the module", works("passes", *loaded).out)
    assert re.search(r'suffix +a string +"_loud"', works("passes", "test-shout", *loaded).out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("folds", "no pass called 'folds'; did you mean 'fold'?"),
        ("expand{opps=1}", "expand has no option 'opps'; did you mean 'ops'?"),
        ("cse dce", "expected ','"),
    ],
)
def test_an_error_in_a_pipeline_has_a_caret(module: Path, text: str, message: str) -> None:
    err = refused("opt", module, "--passes", text)
    assert message in err
    assert "^" in err.splitlines()[-1]


# ------------------------------------------------------------------ diff


def changed(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "changed.irc"
    path.write_text(text)
    return path


def test_equal_modules(module: Path, tmp_path: Path) -> None:
    answer = works("diff", module, changed(tmp_path, PLAIN))
    assert answer.out == "", "locations are no difference"
    found = works("diff", module, "-", "--json", stdin=MODULE).json
    assert found == {"same": True, "same_structure": True, "changes": []}


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("mul %x, %x", "add %x, %x", "@forward: 5 -> 5 operations: mul 2 -> 0, add 1 -> 3"),
        ("B=1:2:4", "B=1:2:8", "dim B: (1, 2, 4) -> (1, 2, 8)"),
        ('random("w", 1', 'random("w", 2', "weight w: f32[8, 4] = random("),
        ("@m ", "@n ", "name: m -> n"),
        ("add %two, %again", "add %again, %two", "@forward: the same operations, with other op"),
        ("(y: f32", "(z: f32", "function forward: (x: f32[B, 4]) -> (y: f32[B, 8]) -> "),
    ],
)
def test_a_difference_is_named(module: Path, tmp_path: Path, old: str, new: str, line: str) -> None:
    answer = irc("diff", module, changed(tmp_path, PLAIN.replace(old, new)))
    assert (answer.status, answer.err) == (1, "")
    assert line in answer.out.partition("\n\n")[0]
    assert re.search(rf"^-.*{re.escape(old)}", answer.out, re.MULTILINE)
    assert re.search(rf"^\+.*{re.escape(new)}", answer.out, re.MULTILINE)


def test_removed_entries_are_named(module: Path, tmp_path: Path) -> None:
    less = "module @m {\n  func @other(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}\n"
    answer = irc("diff", module, changed(tmp_path, less), "--summary")
    assert answer.status == 1
    gone = ["dim B: gone", "weight w: gone", "function forward: gone", "function other: new"]
    assert answer.out.splitlines() == gone


def test_other_names_are_no_other_structure(module: Path, tmp_path: Path) -> None:
    other = changed(tmp_path, PLAIN.replace("%sum", "%total"))
    answer = irc("diff", module, other)
    assert answer.status == 1
    assert answer.out.startswith("only the names of values differ\n")
    found = irc("diff", module, other, "--json").json
    assert (found["same"], found["same_structure"]) == (False, True)


def test_a_change_renumbers_nothing(tmp_path: Path) -> None:
    names = ["%x", *(f"%{n}" for n in range(40))]
    pairs = zip(names[1:], names, strict=False)
    body = "".join(f"    {made} = add {of}, %x : f32[2]\n" for made, of in pairs)
    text = f"module @m {{\n  func @f(%x: f32[2]) -> (f32[2]) {{\n{body}    return %39\n  }}\n}}\n"
    fewer = text.replace("    %5 = add %4, %x : f32[2]\n", "").replace("add %5", "add %4")
    out = irc("diff", changed(tmp_path, text), "-", stdin=fewer).out
    summary, lines = out.split("\n\n")
    assert summary == "@f: 41 -> 40 operations: add 40 -> 39"
    assert lines.count("\n@@") == 1
    assert len(re.findall(r"^[+-] .*$", lines, re.MULTILINE)) == 3


def test_another_order_is_a_difference(module: Path, tmp_path: Path) -> None:
    more = '  weight @v : f32[1] = random("v", 1, 0.5)\n'
    first = changed(tmp_path, PLAIN.replace("  func", more + "  func"))
    second = PLAIN.replace("  weight @w", more + "  weight @w")
    found = irc("diff", first, "-", "--json", stdin=second).json
    assert found["changes"] == ["the same entries in another order"]
    assert found["same_structure"] is False


def test_a_callee_is_compared_by_its_name(tmp_path: Path) -> None:
    text = """\
module @m {
  func @half(%x: f32[2]) -> (f32[2]) {
    %y = add %x, %x : f32[2]
    return %y
  }
  func @forward(%x: f32[2]) -> (f32[2]) {
    %z = call %x {callee=@half} : f32[2]
    %w = neg %z : f32[2]
    return %w
  }
}
"""
    changes = irc("diff", changed(tmp_path, text), "-", "--json", stdin=text.replace("@m", "@n"))
    assert changes.json["changes"] == ["name: m -> n"]


# ------------------------------------------------------------------ ops and passes


def test_ops_lists_every_operation() -> None:
    rows = works("ops").out.splitlines()
    backends = ["reference", "onnx", "cuda", "tensorrt", "tensorrt-rtx"]
    assert rows[0].split()[:6] == ["operation", *backends]
    names = [row.split()[0] for row in rows[1:]]
    assert set(names) == {name for name in REGISTRY if "test" not in name}
    found = {row.split()[0]: row.split()[1:6] for row in rows[1:]}
    assert found["add"] == ["yes"] * 5
    assert found["gated_mlp"] == ["expanded"] * 5
    assert found["all_reduce_rms_norm"] == ["expanded"] * 3 + ["yes"] * 2
    assert found["all_to_all"] == ["yes"] * 5
    assert found["shard_slice"] == ["yes"] + ["no"] * 4


def test_ops_of_one_operation() -> None:
    text = works("ops", "softmax").out
    assert text.startswith("softmax %")
    assert "attributes:\n  dim" in text
    assert "sharding: " in works("ops", "linear").out
    assert "backends: reference yes, onnx yes" in text
    found = works("ops", "linear", "--json").json
    assert found["operands"] == ["x", "weight"]
    assert "bias" in found["optional"]
    assert "did you mean 'softmax'?" in refused("ops", "softmaxx")


def test_passes_lists_every_pass() -> None:
    text = works("passes").out
    for name in ("canonicalize", "cse", "dce", "fold", "expand", "fuse-gated-mlp", "fuse-qkv"):
        assert re.search(rf"^{name} +\w", text, re.MULTILINE), name
    assert re.search(r"^  onnx +inline, ", text, re.MULTILINE)
    found = json.loads(works("passes", "--json").out)
    assert {each["name"] for each in found["passes"]} >= {"cse", "dce"}
    assert list(found["default_pipelines"])[:2] == ["reference", "onnx"]


def test_a_pass_of_a_file_names_the_file() -> None:
    example = ROOT / "examples" / "custom_pass.py"
    text = works("passes", "fuse-square", "--load", example).out
    assert text.startswith(f"fuse-square  ({example})\n")


def test_passes_of_one_pass() -> None:
    assert re.search(r"options:\n  ops ", works("passes", "expand").out)
    assert "It has no options." in works("passes", "cse").out
    assert "did you mean 'fold'?" in refused("passes", "folds")
