"""The data of a page against independent facts: texts of all passes, networkx, sizes."""

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.analysis.memory import peak_bytes
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.driver.history import history_of, replay
from irc.frontends.huggingface import model_of
from irc.ir.core import Module, Op
from irc.page.data import page_data
from irc.page.layout import placed
from irc.page.write import page
from irc.pipeline.instruments.history import History, value_names
from irc.text import parse_module
from irc.text.printer import in_scope, names_of
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.page.unfolding import Data, put, text_of
from tests.random_modules import random_module
from tests.tiny_checkpoint import CONFIG

PASSES = (
    'inline, canonicalize, cse, shard{mesh="tp=%d"}, fuse-collectives, fuse-gated-mlp, localize, '
    "fuse-collectives, cse, fold, dce"
)
STAGES = 'inline, shard{mesh="pp=2, tp=1"}, pipeline, localize, cse, fold, dce'
HOSTILE = "</script><script>alert(1)</script>\"'&\u2028\x01/*DATA*/"


def llama(layers: int = 2, passes: str = PASSES % 2) -> History:
    return history_of(model_of(CONFIG | {"num_hidden_layers": layers}).trace("f32"), passes)


def as_read(history: History, **more: Any) -> Data:
    """The data after JSON, as a script gets it."""
    return json.loads(json.dumps(page_data(history, "build/llama", **more), allow_nan=False))


def check_texts(history: History) -> Data:
    """Unfolded, every state is the text of its pass."""
    data = as_read(history)
    for each, record in zip(data["passes"], history.records, strict=True):
        head = re.split(r"\n(?:  weight |  func |}$)", record.text, maxsplit=1)[0]
        wanted = re.sub(r"\n  weight .*", "", record.text)
        assert text_of(data, data["states"][each["state"]], head) == wanted, record.name
    return data


def layers_of(data: Data) -> list[list[int]]:
    entries = data["states"][-1]["functions"][0]["layers"]
    return [entry[1:] for entry in entries if entry[1] >= 0]


@pytest.mark.parametrize("passes", [PASSES % 2, PASSES % 3, STAGES, ""])
def test_unfolded_blocks_are_the_texts(passes: str) -> None:
    check_texts(llama(3, passes))


def test_random_modules_unfold() -> None:
    for seed in fresh(1).integers(10**9, size=30):
        check_texts(history_of(random_module(int(seed)), ""))


def test_equal_layers_are_stored_once() -> None:
    few, many = (as_read(llama(layers)) for layers in (4, 12))
    assert len(json.dumps(many)) < 1.3 * len(json.dumps(few))
    assert len(many["blocks"]) == len(few["blocks"])
    assert [entry[:2] for entry in layers_of(many)] == [[0, 11]]


def test_a_layer_that_differs_is_an_exception() -> None:
    text = llama(5, "").records[0].text
    line = next(n for n in text.splitlines() if "rms_norm" in n and "layers.3.input" in n)
    other = parse_module(text.replace(line, line.replace("eps=1e-05", "eps=0.5")))
    entries = layers_of(check_texts(history_of(other, "")))
    assert [entry[:2] for entry in entries] == [[0, 2], [3, 3], [4, 4]]
    assert entries[0][2] == entries[2][2] != entries[1][2]
    tables = "module @m {\n" + "".join(
        f'  weight @layers.{i}.w : f32[{rows}, 4] = random("w", 1, 0.1)\n'
        for i, rows in enumerate((8, 8, 9))
    )
    lines = (
        f'    %{i} = embedding %x, @layers.{i}.w : f32[2, 4] loc("m.py":1 "layers.{i}")\n'
        for i in range(3)
    )
    head = "  func @f(%x: i32[2]) -> (f32[2, 4]) {\n"
    module = parse_module(tables + head + "".join(lines) + "    return %0\n  }\n}\n")
    entries = layers_of(check_texts(history_of(module, "")))
    assert [entry[:2] for entry in entries] == [[0, 1], [2, 2]], "another type of a weight"


# -- graphs


def drawn_edges(data: Data, number: int, ops: list[Op]) -> set[tuple[Op, Op]]:
    _, _, nodes, edges = data["graphs"][number]
    return {(ops[nodes[a][0]], ops[nodes[b][0]]) for a, b, _ in edges}


def graph_edges(module: Module, ops: list[Op]) -> set[tuple[Op, Op]]:
    """The operations on both sides of a value, by networkx."""
    graph, inside = module.to_networkx(), set(ops)
    pairs = ((op, value) for op in ops for value in graph.successors(op))
    return {(op, user) for op, v in pairs for user in graph.successors(v) if user in inside}


def test_graphs_have_the_edges_of_networkx() -> None:
    history = llama(3)
    data, module = as_read(history), parse_module(history.records[-1].text)
    ops, layer = list(module.main), [op for op in module.main if in_scope(op, "model.layers.1")]
    whole = data["states"][-1]["functions"][0]["graphs"][""]
    assert drawn_edges(data, whole, ops) == graph_edges(module, ops)
    graphs = data["units"][layers_of(data)[0][2]]["graphs"]
    assert {"", "self_attn", "mlp"} <= graphs.keys()
    for scope, number in graphs.items():
        inside = [op for op in layer if in_scope(op, f"model.layers.1.{scope}".rstrip("."))]
        assert drawn_edges(data, number, layer) == graph_edges(module, inside), scope
    shown = module._repr_html_()
    assert shown.count("<rect") == len(ops)
    assert shown.count("<path") == len(graph_edges(module, ops))


def test_large_scopes_are_drawn_by_what_is_in_them() -> None:
    data = as_read(llama(14))
    graphs = data["states"][-1]["functions"][0]["graphs"]
    for scope in ("model", "model.layers"):
        nodes = [what for what, *_ in data["graphs"][graphs[scope]][2]]
        layers = [(put(data, name, 7), *ends) for name, _, *ends in nodes if ends[0] >= 0]
        assert layers == [("model.layers.7", 0, 13)]
    text = "module @m {\n  func @f(%x: f32[4]) -> (f32[4]) {\n    %0 = neg %x : f32[4]\n"
    text += "".join(f"    %{i} = neg %{i - 1} : f32[4]\n" for i in range(1, 450))
    chain = as_read(history_of(parse_module(text + "    return %449\n  }\n}\n"), ""))
    graphs = chain["states"][0]["functions"][0]["graphs"]
    sizes = {name: len(chain["graphs"][number][2]) for name, number in graphs.items()}
    assert sizes == {"": 3, "#0": 200, "#1": 200, "#2": 51}


def test_nodes_are_placed_below_their_operands() -> None:
    count, rng = 120, fresh(2)
    edges = [(int(a), b) for b in range(1, count) for a in rng.integers(b, size=2)]
    places = placed(count, edges)
    assert len(set(places)) == count, "no two nodes in one place"
    assert all(places[a][1] < places[b][1] for a, b in edges)
    assert max(x for x, _ in places) < 16


# -- what passes did, what runs


@pytest.mark.parametrize("passes", [PASSES % 2, STAGES])
def test_origins_and_hits_are_those_of_the_history(passes: str) -> None:
    history = llama(3, passes)
    data, before = as_read(history), list[str]()
    for each, record in zip(data["passes"], history.records, strict=True):
        names = list(value_names(parse_module(record.text)).values())
        runs, others = each["origins"]
        found = {
            names[new + i]: (data["strings"][how], (before[old + i],), None)
            for new, old, count, how in runs
            for i in range(count)
        }
        for new, how, hit, olds in others:
            values = tuple(before[i] for i in olds)
            found[names[new]] = data["strings"][how], values, None if hit < 0 else hit
        wanted = {name: (o.how, o.values, o.hit) for name, o in record.origins.items()}
        assert found == wanted, record.name
        hits = [tuple(put(data, s, n) for s in data["hits"][at]) for at, n in each["hits"]]
        assert hits == [(h.rule, h.rule_where, h.where, h.before) for h in record.hits]
        numbers = [h.number for h in record.hits]
        assert numbers == [*range(each["first"], each["first"] + len(hits))]
        before = names
    others = [data["strings"][other] for *_, other in data["decisions"]]
    chosen = [other for other in others if re.fullmatch(r"\S+ it would take .* more", other)]
    assert passes == STAGES or (chosen and any(each["hits"] for each in data["passes"]))


def test_memory_and_times_are_those_of_the_analysis() -> None:
    history = llama(3)
    data, module = as_read(history), parse_module(history.records[-1].text)
    (stage,), sizes = data["stages"], LocalSizes(module.mesh, typical_sizes(module))
    given = [arg for arg in module.main.args if not re.fullmatch(r"[kv]\d", str(arg.name))]
    live = sum(stage["places"][i][4] for i in stage["live"])
    assert live + sum(sizes.bytes(a.type) for a in given) == peak_bytes(module.main, sizes)
    for i, (_, first, last, offset, size) in enumerate(stage["places"]):
        for _, other, end, start, length in stage["places"][:i]:
            apart = offset + size <= start or start + length <= offset
            assert apart or last < other or end < first, "two values in one place"
    blocks = [data["blocks"][run[0]] for run in data["states"][-1]["functions"][0]["runs"]]
    sent = [each for block in blocks for each in block["comm"].values()]
    assert {kind for kind, *_ in sent} == {"all_reduce", "all_gather"}
    us = sum(us for block in blocks for us in block["us"])
    assert us == pytest.approx(sum(step[2] for step in stage["steps"]), rel=1e-3)


@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_its_command_forecasts_the_memory_shown(
    checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    built, target, gpu = tmp_path / "llama", tmp_path / "p.html", backend == "cuda"
    works("compile", checkpoint, "-o", built, "--mesh", "tp=2,pp=2", "--backend", backend)
    for source in built, built / "module.irc":
        works("show", source, "--html", target)
        data = json.loads(Reader(target.read_text()).scripts[0])
        _, *words = shlex.split(data["commands"]["memory"][0])
        *_, phase = works(*words, "--json").json["phases"]
        shown = [stage["memory"] for stage in data["stages"]]
        for stage, known in zip(shown, phase["memory"], strict=True):
            known["workspace"] *= gpu and source == built
            assert stage == {key: known[key] for key in stage}
    works("show", built, "--html", target)
    figures = dict(json.loads(Reader(target.read_text()).scripts[0])["facts"])
    assert ("if it ran on" in figures["expected"]) != gpu
    assert figures["memory per rank"].endswith("GB" if gpu else "kB")


def test_kernels_of_the_backend_cuda() -> None:
    history = llama(3)
    data = as_read(history, manifest={"backend": "cuda"})
    (stage,) = data["stages"]
    assert stage["unit"] == "step" and len(stage["steps"]) == stage["count"]
    assert data["kernels"]
    assert all("__global__" in data["strings"][source] for _, source in data["kernels"])
    names = list(names_of(parse_module(history.records[-1].text).main).values())
    computed = {names[value] for step in stage["steps"] for value in step[1]}
    assert {"%mixed", "%mixed.1", "%mixed.2"} <= computed


# -- the file


class Reader(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.scripts = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def test_hostile_names_stay_text() -> None:
    text = llama(2, "").records[0].text.replace('"model.norm"', json.dumps(HOSTILE))
    reader = Reader(page(history_of(parse_module(text), ""), HOSTILE))
    assert reader.tags.count("script") == 2 and "alert" not in reader.scripts[1]
    assert HOSTILE in json.loads(reader.scripts[0])["strings"]


def test_pages_of_everything_that_irc_shows(two_ranks: Path, tmp_path: Path) -> None:
    target, numbers, old = tmp_path / "p.html", tmp_path / "numbers.json", tmp_path / "old"
    (tmp_path / "empty.irc").write_text("module @m {\n}\n")
    old.mkdir()
    for name in ("config.json", "module.irc"):  # an artifact of before, without its input
        (old / name).write_bytes((two_ranks / name).read_bytes())
    numbers.write_text('{"values": {"model.layers.0.mlp": 0.5, "%mlp": NaN}}')
    for source in (two_ranks, two_ranks / "module.irc", tmp_path / "empty.irc", old):
        answer = works("show", source, "--html", target, "--overlay", numbers)
        data = json.loads(Reader(target.read_text()).scripts[0])
        assert data["overlays"][0]["values"] == {"model.layers.0.mlp": 0.5, "%mlp": None}
        assert len(data["passes"]) == (len(replay(source).records) if source == two_ranks else 1)
        assert ("no passes" in answer.err) == (source == old)
    numbers.write_text('{"values": 3}')
    assert "is no overlay" in refused("show", old, "--html", target, "--overlay", numbers)
    assert "--html" in refused("show", old, "--overlay", numbers)
    assert "<svg" not in irc.parse("module @m {\n}\n")._repr_html_()
