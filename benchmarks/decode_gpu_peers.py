"""The steps of decode_gpu.py in torch: compiled and captured as one CUDA graph, and eager.

python -m benchmarks.decode_gpu_peers CASE...     each "MODEL ROWS TOKENS CONTEXT REPLAYS"
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.checkpoints import config
from benchmarks.process import graph_us

DEVICE = "cuda"
WARM = 3
ROOM = 512  # tokens of a cache after the context


def model_of(name: str) -> Any:
    """A Llama of a real shape with random weights in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_of(name))).eval()


def sizes_of(name: str) -> dict[str, Any]:
    """The arguments of a LlamaConfig."""
    left_out = ("architectures", "model_type", "torch_dtype")
    return {k: v for k, v in config(name.lower(), "bf16").items() if k not in left_out}


class Decode:
    """A step of some sequences, one token each, after `context` ones in a static cache."""

    def __init__(self, model: Any, rows: int, context: int, steps: int) -> None:
        self._model, self._context = model, context
        room = max(ROOM, steps)
        self._cache: Any = transformers.StaticCache(model.config, max_cache_len=context + room)
        self._ids = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
        self._positions = torch.full_like(self._ids, context)
        before = self._ids.expand(rows, context)
        model(before, past_key_values=self._cache, logits_to_keep=1)  # allocates the caches

    def restart(self) -> None:
        """Go back to the context: each step advances the caches."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._context)

    def __call__(self) -> torch.Tensor:
        """The likeliest next tokens."""
        return likeliest(
            self._model(
                self._ids, position_ids=self._positions, past_key_values=self._cache, use_cache=True
            )
        )


class Prefill:
    """A step of one sequence, which keeps no caches: so it is faster in torch."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = model
        self._ids = torch.ones(1, tokens, dtype=torch.long, device=DEVICE)

    def restart(self) -> None:
        """Nothing is kept."""

    def __call__(self) -> torch.Tensor:
        """The likeliest next token."""
        return likeliest(self._model(self._ids, use_cache=False, logits_to_keep=1))


def likeliest(out: Any) -> torch.Tensor:
    """The likeliest tokens behind the last one."""
    return out.logits[:, -1].argmax(-1)


def eager_ms(step: Callable[[], object], replays: int) -> float:
    """The median of calls that follow each other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for i, event in enumerate(events):
        if i:
            step()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


@torch.inference_mode()
def main() -> None:
    name, *numbers = sys.argv[1:]
    rows, tokens, context, replays = map(int, numbers)
    model = model_of(name)
    if tokens > 1:
        step, what = Prefill(model, tokens), f"prefill of {tokens}"
    else:
        step = Decode(model, rows, context, replays + 4 * WARM)
        what = f"batch {rows}, context {context}"
    compiled, stream = torch.compile(step.__call__, dynamic=False), torch.cuda.Stream()
    torch.cuda.synchronize()  # the weights come from another stream
    with torch.cuda.stream(stream):
        for each in [step] * WARM + [compiled] * WARM:
            step.restart()
            each()
    torch.cuda.synchronize()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    sys.stdin.readline()
    step.restart()
    eager = eager_ms(step, max(1, replays // 8))
    step.restart()
    torch.cuda.synchronize()
    ms = graph_us(compiled, stream, replays) / 1e3
    print(f"{f'{name} bf16, {what}':42} {ms:8.3f} ms by torch.compile, {eager:.3f} eager")


if __name__ == "__main__":
    main()
