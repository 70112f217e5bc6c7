"""Mixtures of experts of the shape of Mixtral on GPUs, by `irc compile --backend cuda` and torch.

    python -m benchmarks.moe_gpu                      one GPU, 1 to 2048 tokens
    python -m benchmarks.moe_gpu --ep 2 --layers 4    experts sharded over two GPUs, with NCCL

A layer is x + experts(rms_norm(x)), with 8 experts of which each token chooses 2. Weights are
repeated random numbers. The floor of a step is the bytes of the experts that some token chose (on
the GPU that has most of them) by the rate at which a plain kernel reads. torch sorts the tokens and
calls grouped_mm, all in one CUDA graph. With several GPUs each has some of the experts, and an
all_reduce adds up their results.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import irc
from benchmarks.decode_gpu_models import opened, timing
from benchmarks.process import exchange, graph_us, run_ranks
from irc.backends.cuda.group import Group
from irc.backends.ranks.communicator import Communicator
from irc.frontends import Module, ModuleList, Tensor, random_weights
from irc.frontends import functional as F
from irc.frontends.layers import MixtureOfExperts, RmsNorm
from irc.ir.dtypes import numpy_dtype

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 4096, 14336
EPS = 1e-5
MOST = 8192  # tokens
REPLAYS = 50


class Layer(Module):
    """A mixture of experts with its norm and residual."""

    def __init__(self) -> None:
        self.norm = RmsNorm(HIDDEN, EPS, dtype="bf16")
        self.moe = MixtureOfExperts(HIDDEN, INNER, EXPERTS, CHOSEN, dtype="bf16")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, HIDDEN] to the same, and the experts of each token."""
        normed = self.norm(x)
        _, chosen = self.moe.gate(normed)
        return x + self.moe(normed), chosen


class Model(Module):
    """Some layers, one after the other."""

    def __init__(self, layers: int) -> None:
        self.layers = ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The result, and the experts of each token in every layer."""
        every: list[Tensor] = []
        for layer in self.layers:
            x, chosen = layer(x)
            every.append(chosen)
        return {"y": x, "chosen": F.concat(every, dim=1)}


def compiled(folder: Path, layers: int, ep: int) -> None:
    """Write the artifact."""
    inputs = {"x": irc.Spec("bf16", ("T", HIDDEN))}
    module = irc.trace(Model(layers), inputs, {"T": (1, 16, MOST)})
    mesh: dict[str, Any] = {"mesh": f"ep={ep}"} if ep > 1 else {}
    irc.compile(random_weights(module, 0), folder, backend="cuda", **mesh)


def run(host: Communicator | None, words: Sequence[str]) -> None:
    """One rank, which measures both; the first one prints."""
    layers, tokens = int(words[1]), [int(word) for word in words[2:]]
    number = 0 if host is None else host.local_rank
    torch.cuda.set_device(number)
    with opened(Path(words[0]), host, True) as program:
        rank = program.rank
        rate = timing(rank).read_rate(rank.kernels) * 1e6
        if not number:
            print(f"{rank.driver.gpu.name}, reads {rate / 1e12:.3f} TB/s, {layers} layers")
        ranks = 1 if host is None else host.ranks
        ours = [step(program, each, layers, ranks) for each in tokens]
        peer = Peer(layers, ranks, number, rank.world)
        for count, (ms, experts) in zip(tokens, ours, strict=True):
            nbytes = experts * 3 * HIDDEN * INNER * 2
            floor, theirs = nbytes / rate * 1e3, peer.ms(count)
            flops = 6 * count * CHOSEN * HIDDEN * INNER * layers
            if not number:
                print(
                    f"{count:6} tokens: irc {ms:8.3f} ms, {experts} experts read, floor "
                    f"{floor:.3f} ({floor / ms:.0%}), {flops / ms / 1e9:.0f} TFLOP/s; "
                    f"torch {theirs:8.3f} ms",
                    flush=True,
                )


def step(program: Any, tokens: int, layers: int, ranks: int) -> tuple[float, int]:
    """(milliseconds of a step, experts that some token chose, of all layers; most of a rank)."""
    x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN), np.float32)
    inputs = {"x": x.astype(numpy_dtype("bf16"))}
    chosen = program.run(inputs)["chosen"].reshape(tokens, layers, CHOSEN)
    stream = program.open({})
    ms = median(stream.times(inputs, REPLAYS))
    stream.close()
    used = [np.unique(chosen[:, i]) * ranks // EXPERTS for i in range(layers)]
    return ms, sum(int(np.bincount(rank_of).max()) for rank_of in used)


class Peer:
    """The layers in torch, on one of `ranks` GPUs."""

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128, 2048])
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place, "mixture")
        compiled(folder, options.layers, options.ep)
        words = [str(folder), str(options.layers), *map(str, options.tokens)]
        if options.ep == 1:
            run(None, words)
        else:
            run_ranks(options.ep, "benchmarks.moe_gpu", *words)


if __name__ == "__main__":
    main()
