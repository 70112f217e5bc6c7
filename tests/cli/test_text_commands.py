"""The commands that read and write text: show, opt, diff, ops, passes, plugins."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from irc.backends.tensorrt.commands import page
from irc.backends.tensorrt.lowering import table
from irc.backends.tensorrt.plugins import find
from irc.backends.tensorrt.target import Target
from irc.ir.declare import REGISTRY
from irc.text import parse_module
from tests.cli.conftest import MODULE, SCRIPT
from tests.cli.runner import entries, irc, refused, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.models.golden import write_safetensors
from tests.user_code import EXAMPLE, restored_registries

PLAIN = re.sub(r" loc\(.*\)", "", MODULE)
PASS = ROOT / "examples" / "custom_pass.py"
TINY = ROOT / "examples" / "tiny_llama"
LLAMA = f"{ROOT}/examples/llama.py --checkpoint {TINY}"
RTX = "--target tensorrt-rtx-1.7"
MINE = '''
from dataclasses import replace
from irc import Pass, register
from irc.ops import Sub
from irc.rewrite import P, apply_rules, rule

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

@rule(P.add("x", "y"))
def confuse(x, y):
    return Sub(x, y)

@register("test-confuse")
class Confuse(Pass):
    def run(self, module, stats):
        stats.update(apply_rules(module, [confuse]))
'''
BESIDE = """\
module @m {
  file @w = "w.safetensors"
  weight @a : f32[2, 4] = @w["a"]
  func @forward(%x: f32[3, 4]) -> (y: f32[3, 2]) {
    %y = linear %x, @a : f32[3, 2]
    return %y
  }
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, a script and passes, in which commands run."""
    for name, text in (("m.irc", MODULE), ("tiny.py", SCRIPT), ("mine.py", MINE)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        yield tmp_path


# What is typed, and a part of what is printed.
PRINTED = [
    ("show m.irc --stats", r"^weight_bytes +128 \(128 B\)$"),
    ("show m.irc --stats", "^  mul +2$"),
    ("show m.irc --scope layers.0", "%two"),
    ("show tiny.py", r'weight @head.weight : f32\[8, 4\] = unbound\("head.weight"\)'),
    ("show tiny.py:other", r"f32\[3, 4\]"),
    ("show tiny.py --locs", r'loc\("tiny.py":11 "head"\)'),
    ("show tiny.py --stats --json", '"name": "tiny"'),
    ("show tiny.py --set width=5", r"f32\[5, 4\]"),
    ("show tiny.py --dtype bf16", r"bf16\[8, 4\]"),
    (f"show {LLAMA}", f"{TINY}/model.safetensors"),
    (f"opt {LLAMA}", f"{TINY}/model.safetensors"),
    ("opt tiny.py --set width=5 --dtype bf16", r"bf16\[5, 4\]"),
    ("opt m.irc --passes cse --limit cse=0", "%again"),
    ("opt m.irc --load mine.py --passes test-shout", "@m_loud"),
    ("opt m.irc --load mine.py --passes test-broken --no-verify", "@v"),
    ("passes --load mine.py", "test-shout +Renames the module"),
    ("passes test-shout --load mine.py", 'suffix +a string +"_loud"'),
    (f"passes fuse-square --load {PASS}", rf"\Afuse-square  \({PASS}\)\n"),
    ("passes expand", r"options:\n  ops "),
    ("passes cse", "It has no options."),
    ("models", "^llama +decoder +k, v +f32, bf16 +tp=2, tp=3, pp=2 +w4a16"),
    ("passes", "^  onnx +inline, "),
    ("passes quantize", "^  w4a16  .*4-bit weights in groups"),
    ("passes quantize --json", '"nvfp4"'),
    ("ops softmax", r"\Asoftmax %(.|\n)*attributes:\n  dim"),
    ("ops softmax", "backends: reference yes, onnx yes"),
    ("ops linear", "sharding: "),
    (f"ops {RTX}/sm_75", "^f64 +is in f64"),
    (f"ops {RTX}/sm_75", "^bf16 +is in bf16, which needs sm_80"),
    (f"plugins --plugin {EXAMPLE}", "^plugin +version"),
    (f"plugins --plugin {EXAMPLE}", r"^example::SoftCap .*y = cap \* tanh\(x / cap\)"),
    (f"plugins --plugin {EXAMPLE}", "^IrcCollective "),
    ("plugins IrcCollective", r"\A# IrcCollective\n(.|\n)*all_reduce_rms_norm"),
    ("plugins IrcCollective", r"^\| `root` \| int \| `-1` \|"),
    ("lint --rules", "attention-valid-lengths"),
]


@pytest.mark.parametrize(("command", "part"), PRINTED)
def test_what_is_printed(command: str, part: str) -> None:
    assert re.search(part, works(*shlex.split(command)).out, re.MULTILINE)


# ------------------------------------------------------------------ show


def test_show_and_opt_print_the_text() -> None:
    for words in (["show", "m.irc"], ["show", "-"], ["opt", "m.irc"], ["opt"]):
        assert works(*words, stdin=MODULE).out == PLAIN, words
    for command in ("show", "opt"):
        assert works(command, "m.irc", "--locs").out == MODULE
    assert works("show", "m.irc", "--json").json["text"] == PLAIN
    assert refused("opt", stdin=MODULE.replace("-> (y: f32[B, 8])", "-> (y: f32[B, 9])"))
    shown = works("show", "tiny.py").out
    assert works("show", "tiny.py:build").out == works("opt", "tiny.py").out == shown
    assert works("opt", stdin=shown).out == shown and shown.count("= linear ") == 2
    assert works("opt", "tiny.py", "--passes", "cse").out.count("= linear ") == 1


def test_show_prints_one_scope() -> None:
    lines = works("show", "m.irc", "--scope", "layers.0.mlp").out.splitlines()
    assert [line.split(" = ")[0].strip() for line in lines[2:-2]] == ["%again", "%sum"]
    err = refused("show", "m.irc", "--scope", "layers.0.mpl")
    assert "no operation is in the scope 'layers.0.mpl'; did you mean 'layers.0.mlp'?" in err
    assert "at the top there are layers, head" in err


def test_show_counts() -> None:
    assert works("show", "m.irc", "--stats", "--json").json == {
        "name": "m",
        "functions": 1,
        "operations": 5,
        "weights": 1,
        "parameters": 32,
        "weight_bytes": 128,
        "by_operation": {"mul": 2, "add": 1, "linear": 1, "return": 1},
    }


def test_show_writes_a_page(folder: Path) -> None:
    path = folder / "m.html"
    assert works("show", "m.irc", "--html", path).out == ""
    text = path.read_text()
    assert text.startswith("<!doctype html>") and "layers.*.mlp" in text
    addresses = set(re.findall(r"https?:[^'\"`\s]*", text))
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    assert addresses <= namespaces, "the page has no links"
    (folder / "m.irc").write_text(MODULE.replace("layers.0.mlp", "<script>alert(1)</script>"))
    works("show", "m.irc", "--html", path)
    assert "<script>alert" not in path.read_text()


# ------------------------------------------------------------------ opt


def test_opt_runs_passes_and_reports_on_standard_error(folder: Path) -> None:
    words = ["opt", "m.irc", "--passes", "cse, dce", "--dump-dir", "d"]
    answer = works(*words, "--diff", "--stats", "--time", "--why-not", "cse")
    assert "%again" not in answer.out and "merged" not in answer.out
    assert "add %two, %two" in str(parse_module(answer.out))
    reports = ["-    %again = mul", "merged +1", "ms +5 -> 4 ops +cse", "cse: no rule nearly"]
    assert all(re.search(each, answer.err) for each in reports)
    assert entries(folder / "d") == ["000-input.irc", "001-cse.irc", "002-dce.irc"]
    assert works("show", "d/001-cse.irc").out.count("mul") == 1


def test_passes_are_checked() -> None:
    works("opt", "m.irc", "--passes", "cse", "--check-numerics")
    words = ["opt", "m.irc", "--load", "mine.py", "--passes", "test-wrong"]
    works(*words)
    assert "test-wrong changes the result y" in refused(*words, "--check-numerics")
    for command in ("opt --passes", "compile --dry-run --pipeline"):
        words = [*command.split(), "test-broken", "--load", "mine.py", "m.irc"]
        err = refused(*words)
        assert "weight @v is filed under the name 'w'" in err
        assert "the module was valid before the pass test-broken" in err
        works(*words, "--no-verify")


def test_the_tolerance_of_numerics() -> None:
    words = ["opt", "m.irc", "--load", "mine.py", "--passes", "test-wrong", "--check-numerics"]
    assert "largest number, where 0.0001 is allowed" in refused(*words)
    assert "where 0.01 is allowed" in refused(*words, "--tolerance", "1e-2")
    works(*words, "--tolerance", "10")
    assert works("opt", "m.irc", "--check-numerics", "--tolerance", "0").out
    for number in ("-1", "nan", "inf", "a"):
        assert "--tolerance" in refused(*words, "--tolerance", number, status=2)
    assert "--tolerance is for --check" in refused("opt", "m.irc", "--tolerance", "1", status=2)


def test_a_module_is_written_to_a_file(folder: Path) -> None:
    assert works("opt", "m.irc", "--passes", "cse", "-o", "new.irc").out == ""
    assert (folder / "new.irc").read_text() == works("opt", "m.irc", "--passes", "cse").out
    (folder / "home").mkdir()
    (folder / "home" / "b.irc").write_text(BESIDE)
    write_safetensors(folder / "home" / "w.safetensors", {"a": np.ones((2, 4), np.float32)})
    works("opt", "home/b.irc", "-o", "moved.irc")
    works("opt", "moved.irc", "--passes", "dce", "--check-numerics")
    assert '@w = "home/w.safetensors"' in (folder / "moved.irc").read_text()
    works("compile", "home/b.irc", "-o", "made")
    kept = entries(folder)
    for source, output in (("m.irc", "./m.irc"), ("made", "made/module.irc"), ("m.irc", "made")):
        assert f"-o {output} would" in (said := refused("opt", source, "-o", output)) or (
            "in a folder that exists" in said
        )
    assert "in a folder that exists" in refused("opt", "m.irc", "-o", "none/m.irc")
    words = ["opt", "m.irc", "--load", "mine.py", "--passes", "test-broken", "-o", "out.irc"]
    assert "filed under" in refused(*words)
    assert entries(folder) == kept


def commands(text: str) -> list[list[str]]:
    """The commands of irc in a text, without the name of the program."""
    return [shlex.split(line)[1:] for line in re.findall(r"irc opt .*", text)]


def test_a_reproducer_keeps_limits_checks_and_weight_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    (folder / "given").mkdir()
    write_safetensors(folder / "given" / "w.safetensors", arrays)
    body = [
        *("%a = add @w, %x", "%b = add %a, %a", "%again = add @w, %x"),
        *("%c = add %b, %again", "%d = mul %c, @v", "%more = mul %c, @v", "%e = mul %d, %more"),
    ]
    text = 'module @m {\n  file @f = "w.safetensors"\n'
    text += "".join(f'  weight @{name} : f32[4] = @f["{name}"]\n' for name in arrays)
    text += "  func @f(%x: f32[4]) -> (y: f32[4]) {\n"
    text += "".join(f"    {op} : f32[4]\n" for op in body) + "    return %e\n  }\n}\n"
    (folder / "given" / "m.irc").write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    words = ["opt", folder / "given" / "m.irc", "--load", "mine.py", "--check-numerics"]
    words += ["--limit", "cse=1", "--limit", "test-confuse=1", "--dump-dir", folder / "dumps"]
    err = refused(*words, "--passes", "cse, test-confuse, cse")
    (again,) = commands(err)
    made = ["--check-numerics", "--limit", "test-confuse=1", "--limit", "cse=0"]
    assert again[-7:] == [*made, "--passes", "test-confuse, cse"]
    monkeypatch.chdir(folder.parent)
    assert "test-confuse changes the result y" in refused(*again)
    dump = (folder / "dumps" / "001-cse.irc").read_text()
    (made_by,) = commands(dump)
    assert made_by[-5:] == ["--check-numerics", "--limit", "cse=1", "--passes", "cse"]
    monkeypatch.chdir(folder / "dumps")
    assert works(*made_by).out == dump.partition("\n")[2]


def test_numerics_are_checked_with_the_weights_beside_the_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text wherever it is named from, of standard input, and of an artifact."""
    for name in ("home", "away"):
        (folder / name).mkdir()
    (folder / "home" / "m.irc").write_text(BESIDE)
    arrays = {"a": fresh().standard_normal((2, 4)).astype(np.float32)}
    write_safetensors(folder / "home" / "w.safetensors", arrays)
    works("compile", "home/m.irc", "-o", "made", "--bundle")
    words = ("--passes", "expand, fold, dce", "--check-numerics")
    monkeypatch.chdir(folder / "away")
    for text in (folder / "home" / "m.irc", "../home/m.irc"):
        assert works("opt", text, *words).out == BESIDE
    assert "cannot read" in refused("opt", *words, stdin=BESIDE)
    for place in ("../made", "../made/module.irc", "../made/rank0.onnx"):
        works("opt", place, *words)
    monkeypatch.chdir(folder / "home")
    assert works("opt", "m.irc", *words).out == BESIDE
    assert works("opt", *words, stdin=BESIDE).out == BESIDE


# ------------------------------------------------------------------ diff

CALL = """\
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


def test_equal_modules(folder: Path) -> None:
    (folder / "plain.irc").write_text(PLAIN)
    assert works("diff", "m.irc", "plain.irc").out == "", "locations are no difference"
    assert works("diff", "tiny.py", "tiny.py").out == ""
    same = works("diff", "m.irc", "-", "--json", stdin=MODULE).json
    assert same == {"same": True, "same_structure": True, "changes": []}


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("mul %x, %x", "add %x, %x", "@forward: 5 -> 5 operations: mul 2 -> 0, add 1 -> 3"),
        ("B=1:2:4", "B=1:2:8", "dim B: (1, 2, 4) -> (1, 2, 8)"),
        ('random("w", 1', 'random("w", 2', "weight w: f32[8, 4] = random("),
        ("@m ", "@n ", "name: m -> n"),
        ("add %two, %again", "add %again, %two", "@forward: the same operations, with other op"),
        ("(y: f32", "(z: f32", "function forward: (x: f32[B, 4]) -> (y: f32[B, 8]) -> "),
        ("%sum", "%total", "only the names of values differ"),
    ],
)
def test_a_difference_is_named(old: str, new: str, line: str) -> None:
    other = PLAIN.replace(old, new)
    answer = irc("diff", "m.irc", "-", stdin=other)
    assert (answer.status, answer.err) == (1, "")
    assert line in answer.out.partition("\n\n")[0]
    assert re.search(rf"^-.*{re.escape(old)}", answer.out, re.MULTILINE)
    assert re.search(rf"^\+.*{re.escape(new)}", answer.out, re.MULTILINE)
    facts = irc("diff", "m.irc", "-", "--json", stdin=other).json
    assert (facts["same"], facts["same_structure"]) == (False, old == "%sum")


V = '  weight @v : f32[1] = random("v", 1, 0.5)\n'


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        (
            PLAIN,
            "module @m {\n  func @other(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}\n",
            ["dim B: gone", "weight w: gone", "function forward: gone", "function other: new"],
        ),
        (
            PLAIN.replace("  func", f"{V}  func"),
            PLAIN.replace("  weight @w", f"{V}  weight @w"),
            ["the same entries in another order"],
        ),
        (CALL, CALL.replace("@m", "@n"), ["name: m -> n"]),
    ],
    ids=["entries gone and new", "another order", "a callee by its name"],
)
def test_changes(first: str, second: str, changes: list[str], folder: Path) -> None:
    (folder / "first.irc").write_text(first)
    answer = irc("diff", "first.irc", "-", "--json", stdin=second)
    assert answer.json == {"same": False, "same_structure": False, "changes": changes}
    answer = irc("diff", "first.irc", "-", "--summary", stdin=second)
    assert (answer.status, answer.out.splitlines()) == (1, changes)


def test_a_change_renumbers_nothing(folder: Path) -> None:
    names = ["%x", *(f"%{n}" for n in range(40))]
    pairs = zip(names[1:], names, strict=False)
    body = "".join(f"    {made} = add {of}, %x : f32[2]\n" for made, of in pairs)
    text = f"module @m {{\n  func @f(%x: f32[2]) -> (f32[2]) {{\n{body}    return %39\n  }}\n}}\n"
    (folder / "first.irc").write_text(text)
    fewer = text.replace("    %5 = add %4, %x : f32[2]\n", "").replace("add %5", "add %4")
    summary, lines = irc("diff", "first.irc", "-", stdin=fewer).out.split("\n\n")
    assert summary == "@f: 41 -> 40 operations: add 40 -> 39"
    assert lines.count("\n@@") == 1
    assert len(re.findall(r"^[+-] .*$", lines, re.MULTILINE)) == 3


# ------------------------------------------------------------------ ops, passes and plugins


def test_ops_lists_every_operation() -> None:
    first, *rows = (row.split() for row in works("ops").out.splitlines())
    assert first[:6] == ["operation", "reference", "onnx", "cuda", "tensorrt", "tensorrt-rtx"]
    support = {name: words[:5] for name, *words in rows}
    assert set(support) == {name for name in REGISTRY if "test" not in name}
    assert support["add"] == support["all_to_all"] == ["yes"] * 5
    assert support["gated_mlp"] == ["expanded"] * 2 + ["yes"] + ["expanded"] * 2
    assert support["all_reduce_rms_norm"] == ["expanded"] * 3 + ["yes"] * 2
    assert support["shard_slice"] == ["yes"] + ["no"] * 4
    facts = works("ops", "linear", "--json").json
    assert facts["operands"] == ["x", "weight"] and "bias" in facts["optional"]


def test_passes_lists_every_pass() -> None:
    text = works("passes").out
    for name in ("canonicalize", "cse", "dce", "fold", "expand", "fuse-gated-mlp", "fuse-qkv"):
        assert re.search(rf"^{name} +\w", text, re.MULTILINE), name
    facts = works("passes", "--json").json
    assert {each["name"] for each in facts["passes"]} >= {"cse", "dce"}
    assert list(facts["default_pipelines"])[:2] == ["reference", "onnx"]


def test_ops_for_a_target_prints_the_table_of_lowerings(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = works("ops", "--target", "tensorrt-rtx-1.7/sm_89", "--json").json
    assert {each["op"] for each in rows} == set(REGISTRY)
    assert all(each["choice"] and each["reason"] and each["source"] for each in rows)
    asked: list[Target] = []

    def few(target: Target) -> list[table.Row]:
        asked.append(target)
        return [table.Row("add", "as ONNX", "it has it", "docs"), table.Row("mul", "Mul", "r", "s")]

    monkeypatch.setattr(table, "rows", few)
    words = ("ops", "--target", "tensorrt-rtx-1.7/sm_89")
    answer = works(*words)
    head, first, *_ = answer.out.splitlines()
    assert answer.err == "" and "needs sm_80" not in answer.out
    assert head.split() == ["operation", "becomes", "reason", "source"]
    assert re.split("  +", first) == ["add", "as ONNX", "it has it", "docs"]
    assert asked == [Target("tensorrt-rtx", (1, 7), (89,))]
    expected = {"op": "mul", "choice": "Mul", "reason": "r", "source": "s"}
    assert works(*words, "mul", "--json").json == [expected]
    assert "| `add` | as ONNX | it has it | docs |" in works(*words, "--markdown").out
    err = works("ops", "--target", "tensorrt-rtx-9.9/sm_89").err
    assert "irc knows no version after tensorrt-rtx-1.7; what holds there is assumed" in err


@pytest.mark.parametrize("name", ["SoftCap", "example::SoftCap"])
def test_the_page_of_a_plugin(name: str) -> None:
    out = works("plugins", name, "--plugin", EXAMPLE).out
    assert out == page(find("SoftCap", namespace="example"))
    assert "version 1, namespace `example`" in out
    assert "| `cap` | float | required | the bound, more than 0 |" in out
    assert "| `T` | f32 f16 bf16 |" in out and "| output | `y` | T | as x |" in out
    assert "imported as the operation `soft_cap`" in out
    (facts,) = works("plugins", name, "--load", EXAMPLE, "--json").json
    keys = ("namespace", "version", "operation")
    assert [facts[key] for key in keys] == ["example", "1", "soft_cap"]
    assert [field["name"] for field in facts["fields"]] == ["cap"]
