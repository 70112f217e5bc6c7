"""IR throughput on 100,000 operations beside xDSL and onnx-ir; a 126-layer Llama; import time.

    python -m benchmarks.ir [--blocks 25000] [--repeat 3]

The graph is a chain of blocks of four operations: silu, mul, add, neg. `fuse` replaces silu + mul
by one operation in every block. Rates are operations of the graph per second, the best of the
repetitions; "-" where a library has no such function.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.ir_peers import onnx_ir_steps, xdsl_steps
from benchmarks.process import timed
from irc.ir.core import Function, Module
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Add, Mul, Neg, Return, Sigmoid, Silu
from irc.rewrite import P, apply_rules, rule
from irc.text import parse_module, print_module

STEPS = ("build", "verify", "print", "parse", "fuse")
GOALS = {"build": 200, "verify": 500, "print": 300, "parse": 100, "fuse": 300}


@rule(P.mul(P.silu("x"), "x"))
def fuse_block(x: Any) -> Any:
    """silu(x) * x becomes one operation."""
    return Sigmoid(x)


def build(blocks: int) -> Module:
    """The chain of blocks in irc."""
    module = Module("chain")
    function = module.add_function(Function("forward", [("x", TensorType("f32", (4, 8)))]))
    x = function.args[0]
    for _ in range(blocks):
        gate = function.append(Silu(x)).result
        product = function.append(Mul(gate, x)).result
        total = function.append(Add(product, x)).result
        x = function.append(Neg(total)).result
    function.append(Return([x]))
    return module


def irc_steps(blocks: int) -> tuple[dict[str, float], int]:
    """(seconds per step, blocks that were fused)."""
    seconds: dict[str, float] = {}
    module = timed(seconds, "build", lambda: build(blocks))
    timed(seconds, "verify", lambda: verify(module))
    text = timed(seconds, "print", lambda: print_module(module))
    timed(seconds, "parse", lambda: parse_module(text))
    timed(seconds, "fuse", lambda: apply_rules(module, [fuse_block]))
    return seconds, sum(1 for op in module.main if op.opname == "sigmoid")


def best(
    run: Callable[[int], tuple[dict[str, float], int]], blocks: int, repeat: int
) -> dict[str, float]:
    """Thousands of operations per second, the best of the repetitions."""
    runs: list[dict[str, float]] = []
    for _ in range(repeat):
        seconds, fused = run(blocks)
        if fused != blocks:
            raise RuntimeError(f"{fused} of {blocks} blocks were fused")
        runs.append(seconds)
    return {s: 4 * blocks / min(r[s] for r in runs) / 1000 for s in STEPS if s in runs[0]}


def llama_times() -> dict[str, float]:
    """Milliseconds for a 126-layer Llama: trace, default pipeline, print, parse."""
    import irc.passes  # noqa: F401  (registers the passes of the default pipeline)
    from irc.backends import get
    from irc.frontends.huggingface import model_of
    from irc.pipeline import parse_pipeline, run_pipeline

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 126,
        "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    seconds: dict[str, float] = {}
    module = timed(seconds, "trace", lambda: model_of(config).trace("bf16"))
    pipeline = parse_pipeline(get("onnx").default_pipeline)
    timed(seconds, "default pipeline", lambda: run_pipeline(module, pipeline))
    text = timed(seconds, "print", lambda: print_module(module))
    timed(seconds, "parse", lambda: parse_module(text))
    timed(seconds, "verify", lambda: verify(module))
    return {step: 1000 * s for step, s in seconds.items()}


def import_milliseconds() -> float:
    """What `import irc` adds to `import numpy`, the best of five processes."""
    code = "import time, numpy; t = time.perf_counter(); import irc; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        for _ in range(5)
    ]
    return 1000 * min(float(run.stdout) for run in runs)


def table(rates: dict[str, dict[str, float]]) -> None:
    """Print one row per step: every library's rate, the goal, and the lead over the best peer."""
    names = list(rates)
    print(f"{'kops/s':8s}" + "".join(f"{n:>12s}" for n in names) + f"{'goal':>8s}{'lead':>8s}")
    for step in STEPS:
        cells = [rates[n].get(step) for n in names]
        shown = "".join(f"{'-' if c is None else f'{c:.0f}':>12s}" for c in cells)
        peers = [c for c in cells[1:] if c is not None]
        lead = f"{(cells[0] or 0) / max(peers):.1f}x" if peers else "-"
        print(f"{step:8s}{shown}{GOALS[step]:>8d}{lead:>8s}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=25_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("xdsl", "onnx-ir")]
    print(
        f"Python {platform.python_version()}, {', '.join(versions)}, "
        f"{4 * options.blocks} operations"
    )
    rates = {
        "irc": best(irc_steps, options.blocks, options.repeat),
        "xDSL": best(xdsl_steps, options.blocks // 5, options.repeat),
        "onnx-ir": best(onnx_ir_steps, options.blocks, options.repeat),
    }
    table(rates)
    print("xDSL ran a fifth of the blocks. onnx-ir has no verifier; its print is the display text,")
    print("which cannot be parsed, so its parse reads the protobuf form.")
    print("126-layer Llama: " + ", ".join(f"{k} {v:.0f} ms" for k, v in llama_times().items()))
    print(f"import irc on top of numpy: {import_milliseconds():.0f} ms")


if __name__ == "__main__":
    main()
