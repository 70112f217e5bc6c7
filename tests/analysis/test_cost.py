"""Costs of operations, counted one by one and against measured figures; amounts for people."""

import re
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.analysis.cost import FREE, Cost, cost_of, operations, total
from irc.analysis.memory import peak_bytes, weight_bytes
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.topology_file import default_topology
from irc.analysis.units import amount
from irc.errors import Error
from irc.frontends.huggingface import model_of
from irc.ir.core import Module, Op
from irc.ir.mesh import Mesh
from irc.ops.attention import Attention, visible
from irc.pipeline import run_pipeline
from irc.text import parse_module

assert irc.passes
MESH = Mesh.parse("tp=3")


def op_of(text: str, args: str, mesh: str = "") -> Op:
    """An operation, alone in a module."""
    module = parse_module(
        f"module @m mesh({mesh}) {{\n  func @forward({args}) -> ({text.split(' : ')[-1]}) {{\n"
        f"    %y = {text}\n    return %y\n  }}\n}}"
    )
    return next(iter(module.main))


QUANTIZED = """module @m {
  func @forward(%x: bf16[3, 64], %w: CODES[32, 64], %s: bf16[32, BLOCKS], %t: f32[3, 1])
      -> (bf16[3, 32]) {
    %q = quantize %x, %t {dtype="CODES"} : CODES[3, 64]
    %v = dequantize %q, %t {dtype="bf16"} : bf16[3, 64]
    %d = dequantize %w, %s : bf16[32, 64]
    %y = linear USED, %d : bf16[3, 32]
    return %y } }"""


@pytest.mark.parametrize(
    ("codes", "blocks", "used", "nbytes", "kind"),
    [
        ("i8", 1, "%v", 3 * 64 + 3 * 4 + 32 * 64 + 32 * 2, "i8"),
        ("f8e4m3", 1, "%v", 3 * 64 + 3 * 4 + 32 * 64 + 32 * 2, "f8e4m3"),
        ("i8", 1, "%x", 3 * 64 * 2 + 32 * 64 + 32 * 2, "bf16"),
        ("i4", 4, "%x", 3 * 64 * 2 + 32 * 64 // 2 + 32 * 4 * 2, "bf16"),
    ],
)
def test_products_read_codes(codes: str, blocks: int, used: str, nbytes: int, kind: str) -> None:
    text = QUANTIZED.replace("CODES", codes).replace("BLOCKS", str(blocks)).replace("USED", used)
    module = parse_module(text)
    sizes = LocalSizes(module.mesh, {})
    *before, product = list(module.main)[:-1]
    assert [cost_of(op, sizes).kernels for op in before] == [1, int(used == "%x"), 0]
    assert cost_of(product, sizes) == Cost(2 * 3 * 32 * 64, nbytes + 3 * 32 * 2, 1, kind)


def test_products_read_codes_of_quantize_rows() -> None:
    text = QUANTIZED.replace(", %t: f32[3, 1]", "").replace("CODES", "f8e4m3")
    text = text.replace("%q =", "%t = dynamic_scale %x : f32[3, 1] %q =")
    apart, fused = (parse_module(text.replace("BLOCKS", "1").replace("USED", "%v")) for _ in "ab")
    run_pipeline(fused, "fuse-quantize")
    sizes, ops = LocalSizes(fused.mesh, {}), [list(module.main) for module in (apart, fused)]
    assert cost_of(ops[1][0], sizes).bytes == 3 * 64 * 2 + 3 * 64 + 3 * 4
    assert cost_of(ops[1][-2], sizes) == cost_of(ops[0][-2], sizes)
    assert peak_bytes(fused.main, sizes) == peak_bytes(apart.main, sizes)


@pytest.mark.parametrize(
    ("text", "args", "cost"),
    [
        (
            "linear %x, %w : bf16[3, 4]",
            "%x: bf16[3, 5], %w: bf16[4, 5]",
            Cost(2 * 3 * 4 * 5, 2 * (3 * 5 + 4 * 5 + 3 * 4), 1, "bf16"),
        ),
        # 6 columns on each of three ranks for 16: the last rank has two of padding
        (
            "linear %x, %w : bf16[5, 16@tp]",
            "%x: bf16[5, 7], %w: bf16[16@tp, 7]",
            Cost(2 * 5 * 7 * 6, 2 * (5 * 7 + 6 * 7 + 5 * 6), 1, "bf16"),
        ),
        (
            "linear %x, %w : bf16[5, 7]{sum tp}",
            "%x: bf16[5, 16@tp], %w: bf16[7, 16@tp]",
            Cost(2 * 5 * 7 * 6, 2 * (5 * 6 + 7 * 6 + 5 * 7), 1, "bf16"),
        ),
        (
            "conv %x, %w {groups=2} : f32[3, 6, 5]",
            "%x: f32[3, 4, 7], %w: f32[6, 2, 3]",
            Cost(2 * 3 * 6 * 5 * 2 * 3, 4 * (3 * 4 * 7 + 6 * 2 * 3 + 3 * 6 * 5)),
        ),
        # an operand that is used twice is read once; of a table only the rows of the ids are
        ("mul %x, %x : f32[7]", "%x: f32[7]", Cost(7, 2 * 28)),
        (
            "embedding %ids, %table : bf16[5, 8]",
            "%ids: i32[5], %table: bf16[1000, 8]",
            Cost(0, 5 * 4 + 2 * (5 * 8 * 2)),
        ),
        ("reshape %x {shape=[6, 2]} : f32[6, 2]", "%x: f32[4, 3]", FREE),
        ("unsqueeze %x {dims=[0]} : f32[1, 4, 3]", "%x: f32[4, 3]", FREE),
    ],
)
def test_costs_of_one_rank(text: str, args: str, cost: Cost) -> None:
    assert cost_of(op_of(text, args, "tp=3"), LocalSizes(MESH, {})) == cost


def attention_op(cached: bool, tokens: int, keys: int, **options: Any) -> Attention:
    given = "".join(f", {name}={value}" for name, value in options.items() if value)
    given = given.replace("True", "true")
    past = ", past=%past" if options.pop("past", None) else ""
    given = re.sub(r", past=\w+", "", given)
    kv = f"[2, 3, {keys}, 4]" if cached else f"[2, {keys}, 12]"
    args = f"%q: f32[2, {tokens}, 24], %k: f32{kv}, %v: f32{kv}, %past: i32[2]"
    text = f"attention %q, %k, %v{past} {{head_dim=4{given}}} : f32[2, {tokens}, 24]"
    op = op_of(text, args)
    assert isinstance(op, Attention)
    return op


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}])
@pytest.mark.parametrize("past", [None, 0, 4])
def test_attention_counts_the_unmasked_pairs(
    cached: bool, options: dict[str, Any], past: int | None
) -> None:
    tokens, keys = 4, 11
    op = attention_op(cached, tokens, keys, past=past is not None, **options)
    places = None if past is None else np.full(2, past, np.int32)
    seen = visible(op, 2, tokens, keys, places)
    if past is not None:  # the rest of the cache is empty
        seen = seen & (np.arange(keys) < past + tokens)
    pairs = int(np.count_nonzero(seen[0, 0]))
    read = int(np.count_nonzero(seen[0, 0].any(axis=0)))
    found = cost_of(op, LocalSizes(Mesh(), {}, past or 0))
    assert found.flops == 2 * 6 * pairs * (4 + 4) * 2
    cache = 2 * (2 * 3 * 4 * read * 4)
    assert found.bytes == pytest.approx(cache + 2 * (2 * tokens * 24 * 4))


def test_a_transpose_of_single_rows_is_a_view() -> None:
    op = op_of("transpose %x {order=[1, 0, 2]} : f32[4, B, 3]", "%x: f32[B, 4, 3]")
    assert cost_of(op, LocalSizes(Mesh(), {"B": 1})).bytes == 0
    assert cost_of(op, LocalSizes(Mesh(), {"B": 2})).bytes == 2 * 24 * 4


@pytest.mark.parametrize(("user", "free"), [("matmul %x, %t", True), ("add %t, %t", False)])
def test_a_transpose_before_a_product_is_free(user: str, free: bool) -> None:
    module = parse_module(
        f"""module @m {{
  func @forward(%x: f32[2, 3, 3]) -> (f32[2, 3, 3]) {{
    %t = transpose %x {{order=[0, 2, 1]}} : f32[2, 3, 3]
    %y = {user} : f32[2, 3, 3]
    return %y
  }}
}}"""
    )
    turned = next(iter(module.main))
    assert (cost_of(turned, LocalSizes(Mesh(), {})).bytes == 0) is free


def test_a_symbol_without_a_size_is_named() -> None:
    op = op_of("silu %x : f32[S, 2]", "%x: f32[S, 2]")
    with pytest.raises(Error, match=r"S has no size.*--dims S=1:128"):
        cost_of(op, LocalSizes(Mesh(), {"B": 1}))


def test_time_is_the_longer_of_arithmetic_and_memory() -> None:
    device = default_topology().device
    memory = device.hbm_gb_s * 1e3
    assert Cost(0, 10 * memory, 2).time(device) == pytest.approx(10 + 2 * device.kernel_us)
    products = Cost(30 * device.peak("bf16"), 10 * memory, 1, "bf16")
    assert products.time(device) == pytest.approx(30 + device.kernel_us)
    assert device.peak("f64") == min(device.peak(name) for name in device.peak_tflops)


def llama_8b() -> Module:
    return model_of(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 1024,
        }
    ).trace("bf16")


def test_a_step_of_the_8b_shape_reads_what_was_measured() -> None:
    """benchmarks of one H200: 15.0 GB per token at batch 1, at most 6 % over for activations."""
    module = llama_8b()
    sizes = LocalSizes(module.mesh, typical_sizes(module, S=1, T=1), past=512)
    found = total(cost_of(op, sizes) for op in operations(module.main))
    assert 15.0e9 < found.bytes < 15.0e9 * 1.06
    matrices = weight_bytes([module.main], sizes) - 2 * 128256 * 4096
    scores = 32 * 4 * 513 * 4096  # layers, two products of two operations, keys, features
    assert found.flops == pytest.approx(matrices + scores, rel=0.001)  # a weight has two bytes


def test_called_functions_count_each_time() -> None:
    module = parse_module(
        """module @m {
  func @twice(%x: f32[4]) -> (f32[4]) {
    %y = silu %x : f32[4]
    return %y
  }
  func @forward(%x: f32[4]) -> (f32[4]) {
    %a = call %x {callee=@twice} : f32[4]
    %b = call %a {callee=@twice} : f32[4]
    return %b
  }
}"""
    )
    assert [op.opname for op in operations(module.main)] == ["silu", "silu"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.96, "1.0 kB"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (999_940, "999.9 kB"),
        (999_960, "1.0 MB"),
        (16.06e9, "16.1 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_amounts_have_three_digits_or_fewer(size: float, text: str) -> None:
    assert amount(size) == text
