"""Forecasts of modules: phases, stages, and sizes of symbols after passes."""

from pathlib import Path

import pytest

import irc.passes  # noqa: F401  (registers the passes)
from irc.analysis.cost import cost_of, operations
from irc.analysis.forecast import phase, sizes_after, stage_transfers
from irc.analysis.memory import weight_bytes
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.stages import Stages
from irc.analysis.topology_file import default_topology
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.sharded.checking import plan_file
from tests.sharded.models import tiny_llama

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
EVEN = HEADS | {"vocab_size": 48, "intermediate_size": 48}
SIZES = {"B": 2, "S": 6, "T": 1, "C": 16}


def prepared(
    sizes: dict[str, int], mesh: str, *, stages: int = 0, sequence: bool = False
) -> Module:
    module = tiny_llama(head_dim=4, **sizes)
    options = f'mesh="{mesh}"' + (", sequence=true" if sequence else "")
    cut = f", pipeline{{stages={stages}}}" if stages else ""
    run_pipeline(module, f"inline, cse, shard{{{options}}}{cut}, localize, fold, dce")
    return module


def test_a_phase_adds_up_its_operations() -> None:
    module, topology = prepared({}, "tp=3"), default_topology()
    sizes = sizes_after(module, SIZES, past=3)
    found = phase("prefill", module, sizes, topology, tokens=12)
    times = [cost_of(op, sizes).time(topology.device) for op in operations(module.main)]
    assert found.roofline_us + found.kernels_us == pytest.approx(sum(times))
    assert found.collectives_us == pytest.approx(sum(m.us for m in found.messages))
    assert found.us == pytest.approx(sum(times) + found.collectives_us)
    assert (found.tokens, found.past, len(found.memory)) == (12, 3, 1)


def test_stages_share_the_work_and_send_activations() -> None:
    whole, cut = prepared(EVEN, "tp=2"), prepared(EVEN, "pp=3, tp=2", stages=3)
    topology = default_topology()
    assert [len(stage) for stage in Stages(whole.main).functions()] == [1]
    stages = Stages(cut.main).functions()
    assert len(stages) == 3
    sizes = LocalSizes(cut.mesh, typical_sizes(cut, **SIZES))
    parts = [weight_bytes(stage, sizes) for stage in stages]
    assert sum(parts) == weight_bytes([whole.main], LocalSizes(whole.mesh, SIZES))
    found = phase("prefill", cut, sizes, topology)
    plain = phase("prefill", whole, LocalSizes(whole.mesh, SIZES), topology)
    assert found.cost.flops == pytest.approx(plain.cost.flops, rel=0.05)
    assert len(found.memory) == 3
    sends = stage_transfers(cut, sizes, topology)
    hidden = 2 * 6 * 24 * 4
    assert [(m.kind, m.axis, m.size, m.sent) for m in sends] == [("send", "pp", hidden, hidden)] * 2
    assert [m.kind for m in found.messages].count("send") == 2


def test_only_values_used_by_another_stage_are_sent() -> None:
    """Stage 0 runs two calls; the result of the first is not sent."""
    module = parse_module(
        """module @m local mesh(pp=2) {
  func @half(%x: f32[10]) -> (f32[10]) {
    %y = silu %x : f32[10]
    return %y
  }
  func @forward(%x: f32[10]) -> (f32[10]) {
    %a = call %x {callee=@half, stage=0} : f32[10]
    %b = call %a {callee=@half, stage=0} : f32[10]
    %c = call %b {callee=@half, stage=1} : f32[10]
    %d = call %b {callee=@half, stage=1} : f32[10]
    %e = call %d {callee=@half, stage=1} : f32[10]
    return %e
  }
}"""
    )
    (found,) = stage_transfers(module, LocalSizes(module.mesh, {}), default_topology())
    assert (found.kind, found.size) == ("send", 40)
    assert [len(stage) for stage in Stages(module.main).functions()] == [2, 3]


def test_sizes_of_sharded_symbols() -> None:
    module = prepared(EVEN, "dp=2, tp=2", sequence=True)
    assert set(module.dims) == {"B_dp", "S_tp", "T", "C"}
    sizes = sizes_after(module, SIZES)
    found = {name: sizes.symbols[name] for name in module.dims}
    assert found == {"B_dp": 1, "S_tp": 3, "T": 1, "C": 16}
    assert sizes_after(module, SIZES | {"S": 1}).symbols["S_tp"] == 1  # one token and padding


def test_symbols_of_several_words_and_of_several_splits(tmp_path: Path) -> None:
    text = """module @m dims(seq_len=1:12:24, S=1:4:8, S_tp=1:6:8) {
  weight @fc.weight : f32[6, 4] = random("u", 1, 0.5)
  func @forward(%x: f32[seq_len, 4], %y: f32[S, 4], %z: f32[S_tp, 4])
      -> (f32[seq_len, 6], f32[S, 4], f32[S_tp, 4]) {
    %0 = linear %x, @fc.weight : f32[seq_len, 6]
    return %0, %y, %z
  }
}"""
    rows = ["x 0@dp", "y 0@dp.tp", "z 0@tp", "fc.weight 0@tp"]
    module = parse_module(text)
    run_pipeline(module, f'shard{{mesh="dp=2, tp=3", plan="{plan_file(tmp_path, *rows)}"}}')
    assert set(module.dims) == {"seq_len_dp", "S_dp_tp", "S_tp_tp"}
    found = sizes_after(module, {"seq_len": 10, "S": 7, "S_tp": 8}).symbols
    assert [found[name] for name in ("seq_len_dp", "S_dp_tp", "S_tp_tp")] == [5, 2, 3]


def test_a_symbol_sharded_by_two_inputs_over_two_axes(tmp_path: Path) -> None:
    text = """module @m dims(B=1:8:24) {
  weight @fc.weight : f32[6, 4] = random("u", 1, 0.5)
  func @forward(%x: f32[B, 4], %y: f32[B, 4]) -> (f32[B, 6], f32[B, 4]) {
    %0 = linear %x, @fc.weight : f32[B, 6]
    return %0, %y
  }
}"""
    rows = ["x 0@dp", "y 0@tp", "fc.weight 0@tp"]
    module = parse_module(text)
    run_pipeline(module, f'shard{{mesh="dp=2, tp=4", plan="{plan_file(tmp_path, *rows)}"}}')
    assert sizes_after(module, {"B": 8}).symbols["B_dp_tp"] == 2  # 4*B_dp_tp, not 8
