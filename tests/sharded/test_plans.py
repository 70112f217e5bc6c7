"""Plans: rows and files, their errors, and the types that they give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import irc
import irc.passes
from irc.errors import Error
from irc.ir.core import Module
from irc.passes.shard.plan import Rest, find_row, read_plan
from irc.pipeline import run_pipeline
from tests.sharded import checking
from tests.sharded.checking import plan_file

assert irc.passes
MODULE = """module @m dims(B=1:2:8, T=1:2:8) {
  weight @a.fc1.weight : f32[6, 4] = random("u", 1, 0.5)
  weight @a.fc2.weight : f32[4, 6] = random("d", 1, 0.5)
  func @forward(%x: f32[B, 4], %y: f32[B, 4], %t: f32[T, 4]) -> (f32[B, 4], f32[T, 4]) {
    %0 = linear %x, @a.fc1.weight : f32[B, 6]
    %1 = linear %0, @a.fc2.weight : f32[B, 4]
    %2 = add %1, %y : f32[B, 4]
    return %2, %t
  }
}"""


def sharded(mesh: str, plan: Path | str = "", text: str = MODULE) -> Module:
    return checking.sharded(text, mesh, plan)[0]


def types(module: Module) -> dict[str, str]:
    """Of weights and arguments."""
    values = [*module.weights.values(), *module.main.args]
    return {str(value.name): str(value.type) for value in values}


def fails(mesh: str, plan: Path | str = "", text: str = MODULE) -> str:
    with pytest.raises(Error) as caught:
        sharded(mesh, plan, text)
    return str(caught.value)


TABLES = """module @m dims(B=1:2:8) {
  weight @users : f32[7, 4] = random("u", 1, 0.5)
  weight @tied : f32[7, 4] = random("t", 1, 0.5)
  weight @wpe.weight : f32[9, 4] = random("p", 1, 0.5)
  func @forward(%i: i32[B]) -> (f32[B, 4], f32[B, 4], f32[B, 7]) {
    %0 = embedding %i, @users : f32[B, 4]
    %1 = embedding %i, @tied : f32[B, 4]
    %p = embedding %i, @wpe.weight : f32[B, 4]
    %2 = add %0, %p : f32[B, 4]
    %3 = linear %2, @tied : f32[B, 7]
    return %1, %2, %3
  }
}"""
FC1, FC2 = "a.fc1.weight", "a.fc2.weight"
PLACED: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "the first matching row decides": (
        "tp=2",
        ["*.fc1.weight 1@tp", "*.weight 0@tp  # all others", "", "megatron"],
        {FC1: "f32[6, 4@tp]", FC2: "f32[4@tp, 6]"},
    ),
    "auto chooses for the weights without a row": (
        "tp=2", ["*.fc1.weight replicated", "auto"], {FC1: "f32[6, 4]", FC2: "f32[4@tp, 6]"}
    ),
    "auto follows what rows decide": (
        "tp=2", ["megatron", "*.fc1.weight 0@tp"], {FC1: "f32[6@tp, 4]", FC2: "f32[4, 6@tp]"}
    ),
    "several axes": (
        "dp=2,tp=2",
        ["*.fc1.weight 0@tp, 1@dp", "*.fc2.weight 0@dp.tp", "? replicated"],
        {FC1: "f32[6@tp, 4@dp]", FC2: "f32[4@dp.tp, 6]"},
    ),
    "tp stands for ep.tp without experts": (
        "ep=2,tp=2",
        ["*.fc1.weight 0@tp", "*.fc2.weight 0@ep, 1@tp"],
        {FC1: "f32[6@ep.tp, 4]", FC2: "f32[4@ep, 6@tp]"},
    ),
    "tp stands for ep": ("ep=2", [], {FC1: "f32[6@ep, 4]"}),
    "the batch is sharded over dp": (
        "dp=2", [], {"x": "f32[2*B_dp@dp, 4]", "y": "f32[2*B_dp@dp, 4]", "t": "f32[T, 4]"}
    ),
    "rows for inputs": (
        "dp=2,tp=2",
        ["y replicated", "x 1@tp", "*fc1* 1@tp"],
        {"x": "f32[2*B_dp@dp, 4@tp]", "y": "f32[2*B_dp, 4]"},
    ),
    "replicated by the plan": (
        "tp=2", ["*.fc1.weight 0@tp", "*.fc2.weight replicated"], {FC2: "f32[4, 6]"}
    ),
    "free in the plan": ("tp=2", ["*.fc1.weight 0@tp"], {FC2: "f32[4, 6@tp]"}),
    "a symbol over two axes": (
        "dp=2,tp=3", ["x 0@dp", "y 0@tp", "*fc1* 0@tp"], {"x": "f32[6*B_dp_tp@dp, 4]"}
    ),
    "tables whose rows are added are sharded alike": (
        "ep=2,tp=2", [],
        {"users": "f32[7@ep.tp, 4]", "tied": "f32[7@ep.tp, 4]", "wpe.weight": "f32[9@ep.tp, 4]"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_types_that_a_plan_gives(name: str, tmp_path: Path) -> None:
    mesh, rows, wanted = PLACED[name]
    text = TABLES if "users" in wanted else MODULE
    module = sharded(mesh, plan_file(tmp_path, *rows) if rows else "", text)
    found = types(module)
    assert {name: found[name] for name in wanted} == wanted
    if "B_dp_tp" in module.dims:
        assert module.dims["B_dp_tp"] == (1, 1, 1), "multiples of 6 up to 8"


WRONG: list[tuple[str, str, str]] = [
    ("plan.txt", "*.fc1.weight 0@tp 1@tp", "cannot read '0@tp 1@tp'"),
    ("plan.txt", "*.fc1.weight rows", "plan.txt:1: cannot read 'rows' in '*.fc1.weight rows'"),
    ("plan.txt", "\n*.fc1.weight", "plan.txt:2: '*.fc1.weight' names no dimension and axis"),
    ("plan.txt", "*.fc1.weight replicated, 0@tp", "cannot read 'replicated'"),
    ("plan.txt", "*.fc1.weight 2@tp", "shards dimension 2 of @a.fc1.weight, which is f32[6, 4]"),
    ("plan.txt", "*.fc1.weight 0@tp.tp", "tp shards it twice; write each axis once"),
    ("plan.txt", "*1.weight 0@tp\nx.y 0@tp", "plan.txt:2: x.y 0@tp fits no weight and no input"),
    ("plan.txt", "# nothing", "has no rows; write some such as *.q_proj.weight 0@tp"),
    ("plan.txt", "*.fc1.weight 0@pt", "names the axis pt, which the mesh (tp=2) does not have"),
    ("plan.json", "{", "is not JSON"),
    ("plan.json", "[1]", "holds no JSON object"),
    ("plan.json", "{}", "is not a table of module patterns"),
    ("plan.json", '{"fc1": "colwize"}', "unknown style 'colwize' for fc1; did you mean"),
    ("plan.json", '{"fc1": 3}', "unknown style 3 for fc1"),
    ("plan.json", '{"base_model_tp_plan": "colwise"}', "base_model_tp_plan is 'colwise', but"),
    ("plan.json", '{"model_type": "llama", "tp_plan": {}}', "plan.json has no tp_plan"),
    ("plan.txt", "\xff\xfe", "cannot read the plan"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG)
def test_a_wrong_plan_is_an_error(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    assert message in fails("tp=2", tmp_path / name)


@pytest.mark.parametrize("row", ["0@tp, 1@tp", "0@tp, 0@ep", "1@ep.tp, 0@tp"])
def test_an_axis_that_splits_twice_by_what_tp_stands_for(row: str, tmp_path: Path) -> None:
    said = fails("ep=2,tp=2", plan_file(tmp_path, f"*.fc1.weight {row}"))
    assert f"plan.txt:1: *.fc1.weight {row} on @a.fc1.weight" in said
    assert "tp stands for ep.tp where" in said


def test_a_tp_plan_has_to_fit_somewhere(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layers.*.q": "colwise", "layers.*.o": "rowwise"}))
    said = fails("tp=2", path)
    assert "plan.json: the entry layers.*.q: colwise of the tp_plan fits no weight" in said
    assert "nor do its 1 others; they are called a.fc1.weight" in said
    path.write_text(json.dumps({"layers.*.q": "colwise", "a.fc1": "colwise", "x.y": "gather"}))
    module = irc.parse(MODULE)
    (step,) = run_pipeline(module, f'shard{{mesh="tp=2", plan="{path}"}}')
    told = [note for note in step.stats.notes if "fits no weight" in note]
    assert told == [f"{path}: the entry layers.*.q: colwise of the tp_plan fits no weight"]
    assert types(module)["a.fc1.weight"] == "f32[6@tp, 4]"


def test_names_of_shards_of_weights_in_a_list_can_be_written(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "layers.0.weight 0@tp", "layers.0.bias replicated")
    module = sharded("tp=2", plan, LISTED)
    assert str(irc.parse(str(module))) == str(module)
    assert "bias_part" in {value.name for op in module.ops() for value in op.results}


LISTED = """module @m dims(B=1:2:8) {
  weight @layers.0.weight : f32[4, 4] = random("w", 1, 0.5)
  weight @layers.0.bias : f32[4] = random("b", 1, 0.5)
  func @forward(%x: f32[B, 4]) -> (f32[B, 4]) {
    %y = linear %x, @layers.0.weight, bias=@layers.0.bias : f32[B, 4]
    return %y
  }
}"""


def test_an_axis_that_splits_nothing_is_noted() -> None:
    module = irc.parse(MODULE)
    (step,) = run_pipeline(module, 'shard{mesh="cp=3,tp=2"}')
    assert "nothing is sharded over cp: its 3 ranks do the same" in step.stats.notes


def test_a_mesh_of_stages_alone_needs_no_plan() -> None:
    before = str(irc.parse(MODULE)).replace("@m dims", "@m mesh(pp=2) dims")
    assert str(sharded("pp=2")) == before


CALLS = """module @m {
  func @g(%x: f32[4]) -> (f32[4]) { return %x }
  func @forward(%x: f32[4]) -> (f32[4]) {
    %a = call %x {callee=@g} : f32[4]
    return %a
  } }"""
SHARD = 'shard{mesh="tp=2"}'


@pytest.mark.parametrize(
    ("text", "pipeline", "message"),
    [
        (MODULE, f"{SHARD}, {SHARD}", "the module is sharded already"),
        (MODULE, f"{SHARD}, localize, {SHARD}", "the module is in the local view already"),
        (MODULE.replace("@m", "@m mesh(tp=3)"), SHARD, r"mesh \(tp=3\), but shard has the mesh"),
        (MODULE.replace("[B", "[5").replace("[T", "[3"), 'shard{mesh="dp=2"}', "begins with a sym"),
        (MODULE, f"pipeline{{stages=2}}, {SHARD}", "divided into stages already; put shard before"),
        (CALLS, SHARD, "put inline before it"),
    ],
)
def test_modules_that_cannot_be_sharded(text: str, pipeline: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        run_pipeline(irc.parse(text), pipeline)


@pytest.mark.parametrize("key", ["", "base_model_tp_plan", "tp_plan"])
def test_a_tp_plan_of_a_config(key: str, tmp_path: Path) -> None:
    table = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.fc2": "rowwise"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: table, "hidden_size": 3} if key else table))
    rows, rest = read_plan(str(path))
    assert rest is Rest.ENDS_CHOSEN
    for name, splits in {
        "model.layers.11.self_attn.q_proj.weight": ((0, ("tp",)),),
        "layers.0.self_attn.q_proj.bias": ((0, ("tp",)),),
        "model.layers.1.mlp.fc2.weight": ((1, ("tp",)),),
    }.items():
        found = find_row(rows, name)
        assert found is not None and found.splits == splits, name
    bias = find_row(rows, "model.layers.1.mlp.fc2.bias")
    assert bias is not None and not bias.splits
    assert find_row(rows, "model.layers.1.mlp.fc1.weight") is None
