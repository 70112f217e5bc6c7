"""Attention of few new tokens over long caches on a GPU: the kernels alone, of layers in a row.

    python -m benchmarks.attention_gpu                    one sequence and 16, 512 to 32k tokens
    python -m benchmarks.attention_gpu --tokens 4 --context 8192
    python -m benchmarks.attention_gpu --mixed            16 sequences of 0.5k to 32k tokens
    python -m benchmarks.attention_gpu --pages            caches, and pages in random order
    python -m benchmarks.attention_gpu --caches f8e4m3 i8     codes, as `--kv-cache` makes them
    python -m benchmarks.attention_gpu --shapes "0 splits"    shapes of blocks by name, or all

32 query heads share 8 key heads of 128 features, or a rank's part of them (`--tp`); their rope and
the rows of the caches are computed too, unless caches hold codes. Times are per layer, of launches
that follow each other in a graph, over caches that no cache of the GPU holds. The floor is the
bytes of the keys and values that are visible, by the rate at which a plain kernel reads in the same
run. The results of some heads are compared with the reference.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_timing import Timing
from irc.backends.cuda.codegen.decode_attention import decode_attention, shapes_of, template
from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.execute.load import open_gpu
from irc.backends.cuda.plan import Argument, Launch
from irc.backends.cuda.plan.regime import Regime
from irc.backends.cuda.plan.template import Template
from irc.backends.cuda.tuning import device_of
from irc.backends.reference import evaluate
from irc.ir.core import Module, Value
from irc.ir.dtypes import dtype, numpy_dtype
from irc.ops import Attention, FusedAttention
from irc.text.parser import parse_module

D, HEADS, KEY_HEADS = 128, 32, 8
PAGE = 64  # tokens
COLD = 512 << 20  # bytes of caches, at least, before one is read again
SCALES = {"f8e4m3": 1.0, "i8": 0.025}
NUMBERS = 5_000_011  # random numbers that caches repeat
MIXED = [int(512 * 64 ** (i / 15)) for i in range(16)]


@dataclass(frozen=True)
class Case:
    """Sequences with `past` tokens in caches of `capacity`, and `tokens` new ones; `paged`: the
    caches are pages of a pool."""

    past: Sequence[int]
    tokens: int
    capacity: int
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    cache: str = "bf16"
    paged: bool = False

    def __str__(self) -> str:
        least, most = min(self.past), max(self.past)
        lengths = f"{least} to {most}" if least < most else f"{most}"
        about = f"{self.key_heads} heads, {self.cache}{', paged' * self.paged}"
        return f"{len(self.past)} x {self.tokens} tokens after {lengths}, {about}"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the symbols."""
        sizes = {"B": len(self.past), "S": self.tokens, "C": self.capacity}
        return sizes | {"P": len(self.past) * self.pages}

    @property
    def pages(self) -> int:
        """The pages of a sequence."""
        return -(-self.capacity // PAGE)

    @property
    def nbytes(self) -> int:
        """The bytes of visible keys and values."""
        itemsize = dtype(self.cache).bits // 8
        return (
            sum(min(n + self.tokens, self.capacity) for n in self.past)
            * 2
            * self.key_heads
            * D
            * itemsize
        )

    def module(self) -> Module:
        """The attention of one layer."""
        if self.cache != "bf16":
            return self.module_of_codes()
        wide, narrow = self.heads * D, self.key_heads * D
        q, new = f"bf16[B, S, {wide}]", f"bf16[B, S, {narrow}]"
        rows, size = ("P", PAGE) if self.paged else ("B", "C")
        cache = f"{self.cache}[{rows}, {self.key_heads}, {size}, {D}]"
        inputs = [f"%q: {q}", f"%k: {new}", f"%v: {new}", f"%k0: {cache}", f"%v0: {cache}"]
        inputs += ["%past: i32[B]", "%positions: i32[B, S]"]
        inputs += [f"%pages: i32[B, {self.pages}]"] * self.paged
        results = [f"mixed: {q}", f"k1: {cache} aliases %k0", f"v1: {cache} aliases %v0"]
        call = "fused_attention %q, %k, %v, %k0, %v0, %past, positions=%positions"
        call += ", pages=%pages" * self.paged
        call += f" {{head_dim={D}, causal, theta=500000.0}} : {q}, {cache}, {cache}"
        body = f"%mixed, %k1, %v1 = {call}\n    return %mixed, %k1, %v1"
        head = f"func @main({', '.join(inputs)}) -> ({', '.join(results)})"
        dims = "dims(B=1:1:64, S=1:1:8, C=1:64:131072, P=1:1:99999)"
        return parse_module(f"module @m {dims} {{\n  {head} {{\n    {body}\n  }}\n}}\n")

    def module_of_codes(self) -> Module:
        """The attention over caches of codes, which it reads only."""
        q, shape = f"bf16[B, S, {self.heads * D}]", f"[B, {self.key_heads}, C, {D}]"
        scale = "f32[1, 1, 1, 1]"
        lines = [f"%s = full {{value={SCALES[self.cache]}, shape=[1, 1, 1, 1]}} : {scale}"]
        for name in ("k", "v"):
            lines += [f'%{name} = dequantize %{name}0, %s {{dtype="bf16"}} : bf16{shape}']
        options = f"{{head_dim={D}, causal}}"
        lines += [f"%mixed = attention %q, %k, %v, past=%past {options} : {q}", "return %mixed"]
        inputs = f"%q: {q}, %k0: {self.cache}{shape}, %v0: {self.cache}{shape}, %past: i32[B]"
        body = "\n    ".join(lines)
        dims = "dims(B=1:1:64, S=1:1:8, C=1:64:131072)"
        text = f"func @main({inputs}) -> (mixed: {q}) {{\n    {body}\n  }}"
        return parse_module(f"module @m {dims} {{\n  {text}\n}}\n")


class Bench:
    """Memory and kernels of one GPU."""

    def __init__(self) -> None:
        self.gpu = open_gpu(0, 60.0)
        self.driver = self.gpu.driver
        self.stream: Any = self.driver.stream()
        self.timing = Timing(self.driver, self.stream)
        self.rate = self.timing.read_rate(self.gpu.kernels)
        self.rng = np.random.default_rng(0)
        self.numbers = self.rng.standard_normal(NUMBERS, np.float32)

    def measure(self, case: Case, names: Sequence[str] | None) -> Iterator[str]:
        """Lines of the table."""
        module = case.module()
        (op,) = (op for op in module.main if isinstance(op, Attention | FusedAttention))
        regime = Regime(case.sizes, device_of(self.gpu.target))
        args = module.main.args
        regime.constants = [arg for arg in args if arg.name not in ("k0", "v0")]
        shapes = shapes_of(op, regime)
        chosen = [n for n in shapes if not names or any(name in n for name in names)]
        launches = {name: template(op, regime, shapes[name]) for name in chosen}
        if names is None:
            templates = decode_attention(op, regime)
            first = templates[0] if templates else None
            assert isinstance(first, Template), templates
            launches = {"": first}
        layers = 2 + COLD // max(1, case.nbytes)
        memory = Memory(self, case, module, min(layers, 32))
        self.gpu.kernels.load([launch.kernel for launch in launches.values()])
        for name, launch in launches.items():
            calls = memory.calls(launch, self.gpu.kernels)
            us = self.timing.us(calls * max(1, 32 // len(calls)))
            floor = case.nbytes / self.rate
            wrong = memory.error()
            times = f"{us:8.2f} us, floor {floor:8.2f}, {floor / us:4.0%}"
            yield f"{case!s:50} {name:30} {times}, off by {wrong:.4f}"
        memory.free()


class Memory:
    """The arguments of some layers."""

    def __init__(self, bench: Bench, case: Case, module: Module, layers: int) -> None:
        self.bench, self.case, self.module = bench, case, module
        self.addresses: list[int] = []
        self.arrays: dict[Value, Any] = {}
        self.places: dict[Value, list[int]] = {}
        past = np.array(case.past, np.int32)
        given = {"past": past, "positions": past[:, None] + np.arange(case.tokens, dtype=np.int32)}
        pages = np.random.default_rng(1).permutation(case.sizes["P"])
        self.pages = pages.reshape(len(past), case.pages).astype(np.int32)
        given["pages"] = self.pages
        for arg in module.main.args:
            shape = [number(n, case.sizes) for n in arg.type.shape]
            kind = numpy_dtype(arg.type.dtype)
            if len(shape) == 4:
                nbytes = int(np.prod(shape)) * kind.itemsize
                self.places[arg] = [self.filled(nbytes, kind) for _ in range(layers)]
                continue
            array = given.get(arg.name or "")
            if array is None:
                array = bench.rng.standard_normal(shape, np.float32).astype(kind)
            self.arrays[arg] = array = np.ascontiguousarray(array)
            self.places[arg] = [self.allocated(array.nbytes)] * layers
            bench.stream.upload(self.places[arg][0], array)
        bench.stream.wait("inputs")
        self.out = self.allocated(len(case.past) * case.tokens * case.heads * D * 2)
        self.layers = layers

    def allocated(self, nbytes: int) -> int:
        """Memory that `free` frees."""
        self.addresses.append(self.bench.driver.allocate(nbytes))
        return self.addresses[-1]

    def filled(self, nbytes: int, kind: Any) -> int:
        """Memory with random numbers."""
        address, stream = self.allocated(nbytes), self.bench.stream
        numbers = self.bench.numbers / SCALES.get(self.case.cache, 1.0)
        rows = numbers.astype(kind).view(np.uint8)
        first = min(nbytes, rows.nbytes)
        stream.upload(address, rows[:first])
        stream.wait("numbers")
        for start in range(first, nbytes, first):
            stream.copy(address + start, address, min(first, nbytes - start))
        return address

    def calls(self, launch: Template, kernels: Any) -> list[Any]:
        """The launches of all layers."""
        sizes = self.case.sizes
        extra = list[int]()
        for kind in (*launch.scratch, *launch.zeros):
            nbytes = max(4, 4 * number(kind.shape[0], sizes))
            extra.append(self.allocated(nbytes))
            self.bench.stream.upload(extra[-1], np.zeros(nbytes, np.uint8))
            self.bench.stream.wait("zeros")
        calls = list[Any]()
        grid, shared = launch.grid(sizes), launch.shared(sizes)
        for layer in range(self.layers):
            values = [self.places[value][layer] for value in launch.reads]
            for value in launch.writes:
                cache = launch.in_place.get(value)
                values.append(self.out if cache is None else self.places[cache][layer])
            values += extra
            symbols = [sizes[name] for name in launch.symbols]
            arguments = (*[Argument("x")] * len(values), *symbols)
            bound = Launch(
                *(launch.kernel.name, grid, launch.block, arguments, shared, launch.cluster),
                programmatic=True,
            )
            values += symbols
            calls.append(kernels.bind(bound, launch.kernel, values, True))
        return calls

    def error(self) -> float:
        """The largest error of the last layer's results among some heads."""
        case, stream = self.case, self.bench.stream
        got = np.empty((len(case.past), case.tokens, case.heads * D), numpy_dtype("bf16"))
        stream.download(got, self.out)
        stream.wait("results")
        group, worst = case.heads // case.key_heads, 0.0
        rows = {0, len(case.past) - 1, int(np.argmax(case.past))}
        for row in sorted(rows):
            kv = int(self.bench.rng.integers(case.key_heads))
            part = Case(case.past[row : row + 1], case.tokens, case.capacity, group, 1, case.cache)
            module = part.module()
            given = dict[str, Any]()
            for arg, places in self.places.items():
                name = arg.name or ""
                if name in ("k0", "v0"):
                    parts = self.pages[row].tolist() if case.paged else [row]
                    size = PAGE if case.paged else case.capacity
                    one = np.empty((len(parts), size, D), numpy_dtype(case.cache))
                    for part_of, at in zip(one, parts, strict=True):
                        offset = (at * case.key_heads + kv) * part_of.nbytes
                        stream.download(part_of, places[-1] + offset)
                    stream.wait("cache")
                    given[name] = one.reshape(1, 1, -1, D)[:, :, : case.capacity]
                elif name != "pages":
                    whole = self.arrays[arg][row : row + 1]
                    width = group * D if name == "q" else D
                    given[name] = (
                        whole[..., kv * width : (kv + 1) * width] if whole.ndim == 3 else whole
                    )
            want = evaluate(module, given)["mixed"].astype(np.float32)
            have = got[row : row + 1, :, kv * group * D : (kv + 1) * group * D].astype(np.float32)
            worst = max(worst, float(np.max(np.abs(have - want))))
        return worst

    def free(self) -> None:
        """Free all memory."""
        for address in self.addresses:
            self.bench.driver.free(address)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=[1, 16])
    add("--tokens", nargs="+", type=int, default=[1])
    add("--context", nargs="+", type=int, default=[512, 8192, 32768])
    add("--caches", nargs="+", default=["bf16"])
    add("--mixed", action="store_true")
    add("--tp", type=int, default=1)
    add("--pages", action="store_true")
    add("--shapes", nargs="*")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {' '.join(sys.argv[1:]) or 'no arguments'}")
    bench = Bench()
    print(f"{bench.driver.gpu.name}, reads {bench.rate / 1e6:.3f} TB/s")
    heads = HEADS // options.tp, KEY_HEADS // options.tp
    pasts = [MIXED] if options.mixed else [[n] * r for n in options.context for r in options.rows]
    for past in pasts:
        for tokens in options.tokens:
            for cache in options.caches:
                for paged in (False, True)[: 1 + options.pages]:
                    case = Case(past, tokens, max(past) + 512, *heads, cache, paged)
                    for line in bench.measure(case, options.shapes):
                        print(line, flush=True)


if __name__ == "__main__":
    main()
