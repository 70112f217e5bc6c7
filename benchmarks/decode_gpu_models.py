"""Compiled Llamas of real shapes on one GPU: weights of repeated numbers, times of their steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

import irc
from benchmarks.checkpoints import config
from benchmarks.gpu_timing import Timing
from irc.backends.base import Arrays
from irc.backends.cuda.driver import Array, Driver, Stream
from irc.backends.cuda.execute import rank as rank_module
from irc.backends.cuda.execute.load import CudaProgram, CudaStream
from irc.backends.cuda.execute.memory import packed_offsets
from irc.backends.cuda.execute.rank import CudaRank
from irc.backends.cuda.execute.weights import DeviceWeights, Source, bytes_of
from irc.backends.cuda.plan import Launch, Plan
from irc.backends.cuda.plan.core import Buffer, Step, pointers
from irc.backends.ranks.communicator import Communicator
from irc.ir.core import Weight
from irc.ir.dtypes import numpy_dtype
from irc.ir.result_names import NEXT_TOKENS

# Dtypes and schemes of weights by their names on the command line. The head is bf16 but in HEAD8.
PLAIN = "bf16"
HEAD8 = "w4a16-head8"
CHAIN = 32  # launches of a chain at least: a graph of one takes longer
_WARM = 3  # steps before those that are timed: the second one is captured
# Models besides those of checkpoints.py, by their config.json.
MODELS: dict[str, dict[str, Any]] = {
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
    },
}
_BLOCK = 64 << 20  # bytes of the numbers that all weights repeat


@dataclass(frozen=True)
class Case:
    """A step: `rows` sequences of `tokens` new ones, after `context` ones in the caches."""

    model: str
    scheme: str
    rows: int
    tokens: int
    context: int

    def __str__(self) -> str:
        if self.tokens > 1:
            return f"{self.model} {self.scheme}, prefill of {self.tokens}"
        return f"{self.model} {self.scheme}, batch {self.rows}, context {self.context}"

    @property
    def sizes(self) -> dict[str, int]:
        """The symbols of the module; caches have room for 512 more tokens."""
        capacity = self.context + max(512, self.tokens)
        return {"B": self.rows, "S": self.tokens, "T": 1, "C": capacity}

    @property
    def inputs(self) -> dict[str, Array]:
        """The tokens are arbitrary; logits are computed of the last one."""
        rows, tokens = self.rows, self.tokens
        return {
            "input_ids": np.arange(rows * tokens, dtype=np.int32).reshape(rows, tokens) % 1000,
            "positions": np.tile(np.arange(tokens, dtype=np.int32) + self.context, (rows, 1)),
            "past_lengths": np.full(rows, self.context, np.int32),
            "logit_positions": np.full((rows, 1), tokens - 1, np.int32),
        }


def compile_model(model: str, scheme: str, tp: int, longest: int, folder: Path) -> Path:
    """The artifact that `irc compile --backend cuda` writes, without weights."""
    source = folder / f"{model} source"
    source.mkdir(parents=True, exist_ok=True)
    sizes = MODELS.get(model) or config(model.lower(), PLAIN)
    sizes = sizes | {"max_position_embeddings": longest, "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(sizes))
    words = ["--dtype", PLAIN, "--next-tokens", "--random-weights", "0"]
    if scheme == HEAD8:
        words += ["--quantize", "w4a16"]
    elif scheme != PLAIN:
        words += ["--quantize", scheme, "--exclude", "*lm_head"]
    words += ["--mesh", f"tp={tp}"] if tp > 1 else []
    words += ["--dims", f"B=1:1:64,C=1:{longest}:{longest}"]
    target = folder / f"{model} {scheme} {tp}"
    command = ["compile", str(source), "--backend", "cuda", *words, "-o", str(target)]
    subprocess.run([sys.executable, "-m", "irc", *command], check=True, stdout=subprocess.PIPE)
    return target


class RepeatedWeights(DeviceWeights):
    """Finite numbers in place of all weights, written on the GPU: nothing is read or quantized."""

    def add(
        self, weights: Mapping[str, Weight], check: Callable[[int], None] = lambda size: None
    ) -> None:
        """Allocate and fill the weights that are not there yet."""
        new = {name: weight for name, weight in weights.items() if name not in self.addresses}
        sizes: dict[Source, int] = {name: bytes_of(weight) for name, weight in new.items()}
        offsets, total = packed_offsets(sizes)
        check(total)
        if not total:
            return
        self._place(offsets, total)
        blocks = dict[str, int]()
        for name, weight in new.items():
            address = self.addresses[name] = self._known[name]
            dtype = weight.type.dtype
            if dtype not in blocks:
                blocks[dtype] = filled(self._driver, self._stream, dtype)
            for start in range(0, sizes[name], _BLOCK):
                part = min(_BLOCK, sizes[name] - start)
                self._stream.copy(address + start, blocks[dtype], part)
        self._stream.wait()
        for block in blocks.values():
            self._driver.free(block)


def filled(driver: Driver, stream: Stream, dtype: str) -> int:
    """Device memory with numbers of a dtype: normal ones of scale 0.02, or bytes that are finite
    as floats of 8 bits."""
    numbers, kind = np.random.default_rng(0), numpy_dtype(dtype)
    if kind.itemsize > 1:
        data = (numbers.standard_normal(_BLOCK // kind.itemsize, np.float32) * 0.02).astype(kind)
    else:
        data = numbers.integers(0, 256, _BLOCK, np.uint8) & 0xBF
    address = driver.allocate(_BLOCK)
    stream.upload(address, data)
    stream.wait()
    return address


@contextmanager
def opened(
    folder: Path, host: Communicator | None, early: bool, **options: Any
) -> Iterator[CudaProgram]:
    """The program of an artifact, with repeated weights. `options` are those of `irc.load`."""
    with patch.object(rank_module, "DeviceWeights", RepeatedWeights):
        loaded = irc.load(folder, communicator=host, programmatic=early, **options)
        program: Any = loaded.program
        try:
            yield program
        finally:
            program.close()


def timing(rank: CudaRank) -> Timing:
    """Times calls on the stream of a rank."""
    stream: Any = rank.stream
    return Timing(rank.driver, stream)


class Measured:
    """A case of a program in device memory."""

    def __init__(self, program: CudaProgram, case: Case) -> None:
        self.case, self._rank = case, program.rank
        self._stream: CudaStream = program.open(case.sizes)

    def ms(self, replays: int) -> float:
        """The median of steps that follow each other."""
        return median(self._stream.times(self.case.inputs, replays))

    def token_ms(self, count: int) -> float:
        """The mean of steps that feed their tokens back, as `irc generate` runs them; the one in
        the middle has the context of the case."""
        fed, advanced = {"input_ids": NEXT_TOKENS}, ("positions", "past_lengths")
        inputs = self.case.inputs
        inputs |= {name: inputs[name] - count // 2 for name in advanced}
        steps = self._stream.follow(inputs, fed, advanced, count + _WARM)
        assert steps is not None
        began = [perf_counter() for _ in islice(steps, _WARM)][-1]
        for _ in steps:
            pass
        return (perf_counter() - began) / count * 1e3

    def results(self) -> Arrays:
        """The outputs of a step."""
        return self._stream.step(self.case.inputs)

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self._rank.execution(self.case.sizes).plan

    @property
    def nbytes(self) -> int:
        """The bytes of weights and caches that a step has to read, on this rank."""
        used = dict[str, int]()
        for step in self.plan.steps:
            for name, buffer in self._buffers(step).items():
                if buffer.place == "weight":
                    # of a table, the rows that are looked up
                    used[name] = max(used.get(name, 0), min(buffer.nbytes, step.work.nbytes))
                elif buffer.place == "state":
                    used[name] = round(buffer.nbytes * self._full)
        return sum(used.values())

    @property
    def flops(self) -> int:
        """The floating-point operations of a step on this rank."""
        return sum(step.work.flops for step in self.plan.steps)

    def _buffers(self, step: Step) -> dict[str, Buffer]:
        return {each.buffer: self.plan.buffers[each.buffer] for each in pointers(step)}

    @property
    def _full(self) -> float:
        """The part of the caches that is read."""
        return (self.case.context + self.case.tokens) / self.case.sizes["C"]

    def parts(self) -> list[Part]:
        """The steps of the plan by kernel or kind of call, in the order of their first launches."""
        found = dict[tuple[str, ...], Part]()
        for i, step in enumerate(self.plan.steps):
            operations = " ".join(dict.fromkeys(name.split(".")[0] for name in step.operations))
            if isinstance(step, Launch):
                name, key = step.kernel, (step.kernel,)
            else:
                name, key = (text := f"{step.library}.{step.function}"), (text, operations)
            part = found.setdefault(key, Part(f"{name}: {operations}", [], 0))
            part.steps.append(i)
            states = [b.nbytes for b in self._buffers(step).values() if b.place == "state"]
            part.nbytes += max(0, step.work.nbytes - round(sum(states) * (1 - self._full)))
        return list(found.values())

    def chain_us(self, part: Part) -> float:
        """Microseconds per launch, where the launches of a part follow each other alone."""
        steps = self._rank.execution(self.case.sizes).latest
        chain = part.steps * -(-CHAIN // len(part.steps))
        return timing(self._rank).us([steps[i] for i in chain])

    def close(self) -> None:
        """Free the caches."""
        self._stream.close()


@dataclass
class Part:
    """The steps of a plan that one kernel runs, and their bytes together."""

    name: str
    steps: list[int]
    nbytes: int
