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
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import irc
from benchmarks.decode_gpu_models import opened, timing
from benchmarks.rank import start_ranks
from irc.backends.ranks.communicator import Communicator
from irc.frontends import Module, ModuleList, Tensor, random_weights
from irc.frontends import functional as F
from irc.frontends.layers import MixtureOfExperts, RmsNorm
from irc.frontends.layers.moe import route
from irc.ir.dtypes import numpy_dtype

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 4096, 14336
EPS = 1e-5
MOST = 8192  # tokens
REPLAYS = 50
SECONDS = 300.0  # in which ranks measure


class Layer(Module):
    """A mixture of experts with its norm and residual."""

    def __init__(self) -> None:
        self.norm = RmsNorm(HIDDEN, EPS, dtype="bf16")
        self.moe = MixtureOfExperts(HIDDEN, INNER, EXPERTS, CHOSEN, dtype="bf16")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, HIDDEN] to the same, and the experts of each token."""
        normed = self.norm(x)
        _, chosen = route(self.moe.gate(normed), CHOSEN, True, "bf16")
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
    import torch

    from benchmarks.moe_gpu_peer import Peer

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
            return
        process: subprocess.Popen[Any] = start_ranks(options.ep, "benchmarks.moe_gpu", *words)
        if process.wait(SECONDS):
            raise SystemExit("the ranks failed")


if __name__ == "__main__":
    main()
