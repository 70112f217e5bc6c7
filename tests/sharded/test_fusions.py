"""Fusions over ranks: merged and quantized projections, norms of sums, one by one."""

from __future__ import annotations

import pytest

import irc
from irc.ir.core import Module
from irc.pipeline import Stats
from tests.fresh import fresh
from tests.sharded.checking import FUSE, drawn, spread

ALONE = ("fuse-gated-mlp", FUSE, "localize", "fuse-qkv", "fuse-norm", "cse, canonicalize, dce")
FEATURES = 24


def weight(name: str, shape: str, codes: str, group: int) -> str:
    """The declarations of a quantized weight; `group` 0 is one scale per row."""
    rows, columns = map(int, shape.split(", "))
    groups = columns // group if group else 1
    most = {"i4": 3.0, "i8": 40.0, "f8e4m3": 100.0}[codes]
    return f"""
      weight @{name}.weight : {codes}[{shape}] = random("{name}", 1, {most})
      weight @{name}.scales : f32[{rows}, {groups}] = random("{name}.s", 1, {0.3 / most})"""


def dequantized(name: str, shape: str) -> str:
    return f"%{name} = dequantize @{name}.weight, @{name}.scales : f32[{shape}] "


def quantized(kind: str) -> str:
    """The input of the feed-forward, quantized by one scale, a scale per token, or not at all."""
    x, codes = f"f32[B, S, {FEATURES}]", f"i8[B, S, {FEATURES}]"
    scale = {
        "tensor": "full {value=0.05, shape=[1, 1, 1]} : f32[1, 1, 1]",
        "token": 'dynamic_scale %m {dtype="i8"} : f32[B, S, 1]',
    }
    if not kind:
        return f"%mq = neg %m : {x}"
    return f"""%scale = {scale[kind]}
        %c = quantize %m, %scale : {codes}
        %mq = dequantize %c, %scale : {x}"""


def block(codes: str, group: int, act: str, inputs: str = "") -> Module:
    """Attention and a feed-forward, quantized; gate and up are merged in one weight."""
    f = FEATURES
    wide = f"f32[B, S, {4 * f}]"
    square, merged, down = f"{f}, {f}", f"{8 * f}, {f}", f"{f}, {4 * f}"
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), square)
    shapes |= {"gate_up_proj": merged, "down_proj": down}
    return irc.parse(f"""module @m dims(B=1:2:4, S=1:6:16) {{
      {"".join(weight(name, shape, codes, group) for name, shape in shapes.items())}
      weight @norm : f32[{f}] = random("n", 1, 1.0)
      func @forward(%x: f32[B, S, {f}]) -> (y: f32[B, S, {f}], z: f32[B, S, {f}]) {{
        {"".join(dequantized(name, shape) for name, shape in shapes.items())}
        %n = rms_norm %x, @norm : f32[B, S, {f}]
        %q = linear %n, %q_proj : f32[B, S, {f}]
        %k = linear %n, %k_proj : f32[B, S, {f}]
        %v = linear %n, %v_proj : f32[B, S, {f}]
        %a = attention %q, %k, %v {{head_dim=4, causal}} : f32[B, S, {f}]
        %o = linear %a, %o_proj : f32[B, S, {f}]
        %r = add %x, %o : f32[B, S, {f}]
        %m = rms_norm %r, @norm : f32[B, S, {f}]
        {quantized(inputs)}
        %h = linear %mq, %gate_up_proj : f32[B, S, {8 * f}]
        %g, %u = split %h {{dim=2, sizes=[{4 * f}, {4 * f}]}} : {wide}, {wide}
        %s = {act} %g : {wide}
        %p = mul %s, %u : {wide}
        %d = linear %p, %down_proj : f32[B, S, {f}]
        %t = add %r, %d : f32[B, S, {f}]
        %y = layer_norm %t, weight=@norm : f32[B, S, {f}]
        return %y, %t
      }}
    }}""")


def count(module: Module) -> Stats:
    found = Stats()
    for op in module.ops():
        found.count(op.opname)
    return found


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
@pytest.mark.parametrize(
    ("codes", "group", "act", "norm"), [("i4", 4, "silu", True), ("f8e4m3", 0, "relu", False)]
)
def test_a_quantized_block_is_fused(
    codes: str, group: int, act: str, norm: bool, mesh: str
) -> None:
    module = block(codes, group, act)
    inputs = drawn(module, fresh(5))
    passes = [text for text in ALONE if norm or text != FUSE]
    spread(module, inputs, mesh, after=passes, tolerance=1e-5)
    found = count(module)
    assert (found["gated_mlp"], found["split"], found["linear"]) == (1, 1, 3)
    assert (found["all_reduce_rms_norm"], found["add_layer_norm"]) == (norm, 1)
    assert (found["add_rms_norm"], found["all_gather"]) == (not norm, 0)
    assert found["dequantize"] == 5  # qkv, o, gate, up, down: each has its own scales


@pytest.mark.parametrize("mesh", ["tp=3"])
def test_linears_of_one_input_are_joined_on_every_rank(mesh: str) -> None:
    """The segments of a merged weight too, which shard separated."""
    module = block("i4", 4, "silu")
    inputs = drawn(module, fresh(5))
    after = [FUSE, "localize", "fuse-linears{blocks}", "dce"]
    spread(module, inputs, mesh, after=after, tolerance=1e-5)
    found = count(module)
    assert (found["linear"], found["split"], found["dequantize"]) == (4, 2, 4)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
@pytest.mark.parametrize("inputs", ["tensor", "token"])
def test_codes_travel_between_sharded_tokens(inputs: str, mesh: str) -> None:
    """Sums in another order make one of the few inputs the next code once in a thousand times, and
    that is off by more than the tolerance once in a hundred."""
    module = block("i8", 0, "silu", inputs)
    given = drawn(module, fresh(5), B=1, S=6)
    spread(module, given, mesh, sequence=True, after=ALONE, tolerance=0.05)
    sent = [op.operands[0].type.dtype for op in module.ops() if op.opname == "all_gather"]
    scales = ["f32"] if inputs == "token" else []
    assert sorted(sent) == sorted(["i8", *scales, "f32", "f32"])  # and both results
    assert count(module)["gated_mlp"] == 1
