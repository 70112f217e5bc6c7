"""`pipeline` keeps every bit, sends values to the next stage, and makes independent stages."""

from __future__ import annotations

import random
from typing import Any

import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result
from irc.ir.verify import verify
from irc.passes.pipeline_parallel import PipelineParallel
from irc.pipeline import Stats, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.pipeline.instruments.numerics import random_inputs, small_sizes
from irc.source import Loc
from irc.testing.draw import random_graph
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.test_numerics import bits
from tests.random_modules import random_module
from tests.sharded.models import tiny_llama

assert irc.passes
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}


def cut(module: Module, **options: Any) -> Stats:
    """The statistics of the pass on a module, which is verified."""
    (step,) = run_pipeline(module, [PipelineParallel(**options)], [VerifyEach()])
    return step.stats


def calls_of(module: Module) -> list[Op]:
    return [op for op in module.main if op.opname == "call"]


def one_by_one(module: Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Every stage evaluated by itself: arguments come by name from inputs and the stage before."""
    handed: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for call in calls_of(module):
        function: Function = call.attributes["callee"]
        names = [str(arg.name) for arg in function.args]
        given = {name: handed[name] if name in handed else inputs[name] for name in names}
        handed = evaluate(module, given, function=function.name)
        results |= handed
    return {name: results[name] for name in module.main.result_names()}


def check_stages(module: Module, stages: int) -> None:
    """Check the calls of all stages, their names, results and aliases."""
    main, calls = module.main, calls_of(module)
    assert [op.opname for op in main] == ["call"] * stages + ["return"]
    assert [op.attributes["stage"] for op in calls] == list(range(stages))
    assert list(module.functions)[-stages - 1 : -1] == [f"stage{i}" for i in range(stages)]
    assert module.mesh.size("pp") == stages and module.mesh.names[0] == "pp"
    for call in calls:
        function: Function = call.attributes["callee"]
        for arg, value in zip(function.args, call.operands, strict=True):
            maker = value.producer
            if maker is None:
                assert value in main.args and value.name == arg.name
                continue
            assert maker.attributes["stage"] == call.attributes["stage"] - 1
            names = maker.attributes["callee"].result_names()
            assert names[maker.results.index(value)] == arg.name
    aliases = {name: main.args[at].name for name, at in aliased(main).items()}
    pairs = [
        (name, call.attributes["callee"].args[at].name)
        for call in calls
        for name, at in aliased(call.attributes["callee"]).items()
    ]
    assert dict(pairs) == aliases and len(pairs) == len(aliases)
    text = str(module)
    assert str(parse_module(text)) == text


def aliased(function: Function) -> dict[str, int]:
    names = function.result_names()
    return {names[i]: at for i, at in function.aliases().items()}


def llama(layers: int, **more: Any) -> Module:
    sizes = {"vocab_size": 21, "hidden_size": 12, "intermediate_size": 10, **HEADS} | more
    return tiny_llama(layers, num_hidden_layers=layers, **sizes)


def random_shape(seed: int) -> dict[str, Any]:
    """Sizes of a small Llama, most of them odd."""
    rng = fresh(seed)
    kv_heads, head_dim = int(rng.integers(1, 4)), 2 * int(rng.integers(1, 4))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "head_dim": head_dim,
        "hidden_size": int(rng.integers(3, 20)),
        "intermediate_size": int(rng.integers(3, 30)),
        "vocab_size": int(rng.choice([7, 31, 400])),
        "qkv_bias": bool(rng.integers(2)),
        "mlp_bias": bool(rng.integers(2)),
        "sliding_window": int(rng.integers(0, 3)),
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("layers", range(1, 8))
def test_a_llama_in_stages_is_the_same(layers: int, stages: int, tied: bool) -> None:
    seed = 100 * layers + 10 * stages + tied
    module = llama(layers, tie_word_embeddings=tied, **random_shape(seed))
    if layers < stages:
        with pytest.raises(Error, match=f"has {layers} layers, too few for {stages} stages"):
            cut(module, stages=stages)
        return
    sizes = {name: int(fresh(seed).integers(2, 5)) for name in ("B", "S", "T")} | {"C": 8}
    inputs = random_inputs(module, sizes, int(fresh(seed).integers(1 << 30)))
    before, text = bits(evaluate(module, inputs)), str(module)
    stats = cut(module, stages=stages)
    if stages == 1:
        assert str(module) == text and stats.notes == ["there is one stage, so nothing is cut"]
        return
    check_stages(module, stages)
    assert bits(evaluate(module, inputs)) == before
    assert bits(one_by_one(module, inputs)) == before
    assert stats["transferred"] == stages - 1  # the hidden states, and nothing else
    assert stats["shared weights"] == tied
    run_pipeline(module, "cse, canonicalize, fold, dce, inline, expand", [VerifyEach()])
    check_stages(module, stages)
    assert bits(one_by_one(module, inputs)) == bits(evaluate(module, inputs))


@pytest.mark.parametrize("layers", [5, 6, 7])
def test_cuts_of_the_user(layers: int) -> None:
    module = llama(layers)
    cut(module, cuts="1, 4")
    scopes = [
        {op.loc.scope.split(".")[2] for op in call.attributes["callee"] if layer_of(op)}
        for call in calls_of(module)
    ]
    assert scopes == [{"0"}, {"1", "2", "3"}, set(map(str, range(4, layers)))]


def layer_of(op: Op) -> bool:
    return op.loc is not None and op.loc.scope.startswith("model.layers.")


@pytest.mark.parametrize(("vocabulary", "layers"), [(2, [2, 2, 2]), (2000, [1, 4, 1])])
def test_embedding_and_head_count(vocabulary: int, layers: list[int]) -> None:
    module = llama(6, vocab_size=vocabulary)
    cut(module, stages=3)
    assert [len(aliased(call.attributes["callee"])) // 2 for call in calls_of(module)] == layers


def test_without_scopes_stages_are_balanced() -> None:
    """The head has few rows, and is not a stage by itself."""
    module = llama(12, vocab_size=60)
    for op in module.main:
        op.loc = None
    stats = cut(module, stages=4)
    states = [len(aliased(call.attributes["callee"])) for call in calls_of(module)]
    assert min(states) >= 4 and max(states) <= 8
    assert stats["transferred"] == 3  # the hidden states alone


def decorated(seed: int, scopes: str) -> Module:
    """A random program with layers in order, in any order, or none, and with states."""
    rng, module = random.Random(seed), random_graph(seed)
    main = module.main
    ops = [op for op in main if op.opname != "return"]
    for at, op in enumerate(ops):
        layer = at * 5 // len(ops) if scopes == "rising" else rng.randrange(5)
        if scopes != "none" and rng.random() < 0.7:
            op.loc = Loc("m.py", 1, f"net.blocks.{layer}.op")
    names = [f"r{i}" for i in range(len(main.returned))]
    alias: dict[str, str | None] = dict.fromkeys(names)
    for at, value in enumerate(main.returned):
        arg = next((a for a in main.args if a.type is value.type), None)
        if arg is not None and str(arg.name) not in alias.values() and rng.random() < 0.3:
            alias[names[at]] = arg.name
    main.results = tuple(Result(name, alias[name]) for name in names)
    return module


@pytest.mark.parametrize("scopes", ["rising", "any", "none"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_random_programs_are_the_same(scopes: str, stages: int) -> None:
    start, done = int(fresh(stages).integers(1 << 20)), 0
    for seed in range(start, start + 40):
        module = decorated(seed, scopes)
        inputs = random_inputs(module, small_sizes(module), seed)
        before, text = bits(evaluate(module, inputs)), str(module)
        try:
            cut(module, stages=stages)
        except Error as error:
            assert "too few" in str(error) or "belongs to one stage" in str(error), f"seed {seed}"
            assert str(module) == text
            continue
        done += 1
        check_stages(module, stages)
        assert bits(evaluate(module, inputs)) == before, f"seed {seed}"
        assert bits(one_by_one(module, inputs)) == before, f"seed {seed}"
        run_pipeline(module, "canonicalize, cse, fold, dce", [VerifyEach()])
        check_stages(module, stages)
        assert bits(one_by_one(module, inputs)) == before, f"seed {seed}"
    assert done > 4, "several programs can be divided"


def test_any_module_is_cut_or_refused() -> None:
    start, done = int(fresh(5).integers(1 << 20)), 0
    for seed in range(start, start + 300):
        module = random_module(seed)
        before = str(module)
        try:
            cut(module, stages=2)
        except Error:
            assert str(module) == before, f"seed {seed}"
            continue
        done += 1
        check_stages(module, 2)
    assert done > 5


@pytest.mark.parametrize(
    ("scopes", "groups"),
    [
        (["enc.layer.0", "enc.layer.1", "dec.layer.0", "dec.layer.1"], 4),
        (["0.bert.layer.0", "0.bert.layer.1", "1", "2"], 2),
        (["0", "1.fc", "2", "2.act"], 3),
        (["a.layers.0.experts.0", "a.layers.0.experts.1", "b", "a.layers.1.experts.0"], 2),
    ],
)
def test_layers_are_found_in_scopes(scopes: list[str], groups: int) -> None:
    body = "".join(
        f'    %v{i + 1} = linear %v{i}, @w : f32[B, 4] loc("m.py":1 "{scope}")\n'
        for i, scope in enumerate(scopes)
    )
    text = f"""module @m {{
      weight @w : f32[4, 4] = random("w", 1, 0.5)
      func @forward(%v0: f32[B, 4]) -> (f32[B, 4]) {{
    {body}    return %v4 }} }}"""
    cut(parse_module(text), stages=groups)
    with pytest.raises(Error, match=f"@forward has {groups} layers, too few"):
        cut(parse_module(text), stages=groups + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("stages=-1", "stages is -1"),
        ('stages=3, cuts="4"', '3 stages have 2 cuts, but cuts="4" has 1'),
        ('cuts="4,2"', 'increasing order, such as "4,9", not "4,2"'),
        ('cuts="4,4"', "increasing order"),
        ('cuts="0,4"', "from 1 on"),
        *[(f'cuts="{text}"', "cuts lists layers") for text in ("a", ",", "4,", "²", "9" * 20)],
    ],
)
def test_options_are_checked(options: str, message: str) -> None:
    with pytest.raises(Error) as caught:
        run_pipeline(llama(1), f"pipeline{{{options}}}")
    assert message.replace('"', "'") in str(caught.value).replace('"', "'")


CALLS = """module @m mesh(pp=3) {
  func @f(%x: f32[B]) -> (f32[B]) { %y = neg %x : f32[B] return %y }
  func @forward(%x: f32[B]) -> (f32[B]) {
    %a = call %x {callee=@f, stage=0} : f32[B]
    %b = call %a {callee=@f, stage=1} : f32[B]
    %c = call %b {callee=@f, stage=2} : f32[B]
    return %c
  }
}"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mesh(pp=3)", "", "call has stage=0, but the mesh () has no axis pp"),
        ("mesh(pp=3)", "mesh(pp=2)", "call has stage=2, but the mesh is (pp=2)"),
        (", stage=1", "", "either all calls of a function have a stage or none has"),
        (", stage=0", "", "either all calls of a function have a stage or none has"),
        ("stage=1", "stage=-2", "the stage is -2; stages count from 0, and -1 is none"),
        ("stage=2", "stage=0", "call has stage=0 after one with stage=1; stages rise"),
        ("call %b", "call %a", "call with stage=2 uses %a of stage=0; pass it"),
    ],
)
def test_calls_with_stages_are_checked(old: str, new: str, message: str) -> None:
    verify(parse_module(CALLS))
    assert old in CALLS
    with pytest.raises(Error) as caught:
        verify(parse_module(CALLS.replace(old, new)))
    assert message in str(caught.value)


def test_a_sum_that_is_fused_with_a_norm_has_a_stage() -> None:
    text = """module @m mesh(tp=2) dims(B=1:2:8) {
      weight @n : f32[4] = random("n", 1, 0.5)
      func @forward(%x: f32[B, 4]{sum tp}, %y: f32[B, 4]) -> (f32[B, 4]) {
        %a, %b = all_reduce_rms_norm %x, %y, @n {axis="tp"} : f32[B, 4], f32[B, 4]
        %c = tanh %a : f32[B, 4]
        return %c
      } }"""
    module = parse_module(text)
    cut(module, stages=2)
    check_stages(module, 2)
