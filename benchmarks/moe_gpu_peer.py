"""The layers of moe_gpu.py in torch: sorted tokens, grouped_mm, and NCCL, in one CUDA graph."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from benchmarks.embedding_gpu import exchange
from benchmarks.gpu_timing import graph_us
from benchmarks.moe_gpu import CHOSEN, EPS, EXPERTS, HIDDEN, INNER
from irc.backends.cuda.group import Group


class Peer:
    """The layers of one of `ranks` GPUs."""

    def __init__(self, layers: int, ranks: int, rank: int, group: Group | None) -> None:
        self._group = group if ranks > 1 else None
        self._count = EXPERTS // ranks
        self._first = rank * self._count
        self._layers = [[self._weight(*shape) for shape in self._shapes()] for _ in range(layers)]
        self._stream = torch.cuda.Stream()

    def _shapes(self) -> list[tuple[int, ...]]:
        inner, outer = (self._count, INNER, HIDDEN), (self._count, HIDDEN, INNER)
        return [(HIDDEN,), (EXPERTS, HIDDEN), inner, inner, outer]

    def _weight(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    def ms(self, tokens: int) -> float:
        """Milliseconds of a step."""
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        return graph_us(lambda: self._step(x), self._stream) / 1e3

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._layers:
            x = x + self._mixture(torch.nn.functional.rms_norm(x, (HIDDEN,), layer[0], EPS), *layer)
        return x

    def _mixture(self, x: torch.Tensor, _: Any, router: Any, *weights: Any) -> torch.Tensor:
        scores = torch.softmax((x @ router.T).float(), -1)
        share, chosen = torch.topk(scores, CHOSEN)
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        expert = chosen.flatten() - self._first
        held = (expert >= 0) & (expert < self._count)
        order = torch.where(held, expert, self._count).argsort()  # those of other ranks behind
        numbers = torch.arange(self._count, device="cuda")[:, None]
        ends = (expert[None] == numbers).sum(1).cumsum(0).int()
        grouped = torch.nn.functional.grouped_mm
        rows = x[order // CHOSEN]
        gate, up, down = (weight.transpose(1, 2) for weight in weights)
        hidden = torch.nn.functional.silu(grouped(rows, gate, offs=ends))
        done = grouped(hidden * grouped(rows, up, offs=ends), down, offs=ends)
        done = torch.where(held[order, None], done, 0)
        pairs = torch.empty_like(done).index_copy_(0, order, done)
        mixed = (pairs.view(*chosen.shape, HIDDEN) * share[..., None]).sum(1)
        if self._group is not None:
            stream = torch.cuda.current_stream().cuda_stream
            exchange("all_reduce", self._group, mixed, mixed, stream)
        return mixed
