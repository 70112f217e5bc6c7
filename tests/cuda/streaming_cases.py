"""Streaming products for tests: modules with one, random operands, and results by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import irc.passes
from irc.ir.core import Module, Value
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module

assert irc.passes  # importing it registers the passes
Array: TypeAlias = np.ndarray[Any, Any]
# name -> (dtype of codes, columns of a scale: 0 for none and -1 for a row, zero points)
SCHEMES = {
    "float": ("", 0, False),
    "int8": ("i8", -1, False),
    "int8 groups": ("i8", 128, False),
    "uint8": ("u8", -1, True),
    "fp8": ("f8e4m3", -1, False),
    "fp8 e5m2": ("f8e5m2", 64, False),
    "int4": ("i4", 128, False),
    "int4 of 32": ("i4", 32, False),
    "uint4": ("u4", 64, True),
    "mxfp4": ("f4e2m1", 32, False),
}
CODES = {"i4": (-8, 8), "u4": (0, 16), "i8": (-128, 128), "u8": (0, 256)}


@dataclass(frozen=True)
class Case:
    """A product: scheme of the weights, dtype of x, words of `form`, sizes.

    Words: `norm` in front; `bias`, `gated`, `residual` behind.
    """

    scheme: str
    dtype: str
    form: str
    rows: int
    n: int
    k: int

    def has(self, word: str) -> bool:
        """Whether the form has a word."""
        return word in self.form.split()

    def module(self) -> Module:
        """The module, whose main function has the product alone; weights are arguments."""
        x, n, rows = self.dtype, self.n, f"{self.dtype}[B, {self.n}]"
        arguments, body, source, bias = [f"%x: {x}[B, {self.k}]"], list[str](), "%x", ""

        def weight(name: str, kind: str, *shape: int) -> str:
            arguments.append(f"%{name}: {kind}{list(shape)}")
            return f"%{name}"

        def linear(name: str) -> None:
            codes, group, zero = SCHEMES[self.scheme]
            matrix = weight(f"w{name}", codes or x, n, self.k)
            if group:
                blocks = 1 if group < 0 else self.k // group
                scales = "f8e8m0" if self.scheme == "mxfp4" else x
                parts = [matrix, weight(f"w{name}_scale", scales, n, blocks)]
                if zero:
                    parts.append(f"zero={weight(f'w{name}_zero', codes, n, blocks)}")
                matrix = f"%d{name}"
                to = f'{{dtype="{x}"}} ' if scales == "f8e8m0" else ""
                body.append(f"{matrix} = dequantize {', '.join(parts)} {to}: {x}[{n}, {self.k}]")
            body.append(f"%{name} = linear {source}, {matrix}{bias} : {rows}")

        if self.has("norm"):
            gain = weight("gain", x, self.k)
            body.append(f"%h = rms_norm %x, {gain} {{eps=1e-05}} : {x}[B, {self.k}]")
            source = "%h"
        if self.has("bias"):
            bias = f", bias={weight('bias', x, n)}"
        linear("a")
        result = "%a"
        if self.has("gated"):
            linear("b")
            body += [f"%s = silu %a : {rows}", f"%m = mul %s, %b : {rows}"]
            result = "%m"
        if self.has("residual"):
            arguments.append(f"%r: {rows}")
            body.append(f"%t = add {result}, %r : {rows}")
            result = "%t"
        head = f"module @m dims(B=1:1:64) {{ func @main({', '.join(arguments)}) -> ({rows}) {{"
        module = parse_module("\n".join([head, *body, f"return {result} }} }}"]), "m")
        run_pipeline(module, "fuse-gated-mlp{merged=false}, fuse-linear-epilogue")
        return module

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        """Random operands, so that results are about 1."""
        return {str(value.name): self._random(value, rng) for value in self.module().main.args}

    def _random(self, value: Value, rng: np.random.Generator) -> Array:
        kind, name = value.type.dtype, str(value.name)
        shape = tuple(size if isinstance(size, int) else self.rows for size in value.type.shape)
        if kind in CODES:
            return rng.integers(*CODES[kind], shape).astype(numpy_dtype(kind))
        numbers = rng.standard_normal(shape, np.float32)
        if name.endswith("_scale"):
            codes = SCHEMES[self.scheme][0]
            size = CODES[codes][1] / 2 if codes in CODES else 1.0
            numbers = (np.abs(numbers) + 0.5) / (size * np.sqrt(self.k))
        elif name.startswith("w") and not SCHEMES[self.scheme][0]:
            numbers /= np.sqrt(self.k)
        return numbers.astype(numpy_dtype(kind))

    def expected(self, given: dict[str, Array]) -> Array:
        """The result in f32, of x normalised and rounded."""
        x = given["x"].astype(np.float32)
        if self.has("norm"):
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
            x = (x * given["gain"].astype(np.float32)).astype(given["x"].dtype).astype(np.float32)
        result = self._linear(x, "a", given)
        if self.has("gated"):
            result = result / (1 + np.exp(-result)) * self._linear(x, "b", given)
        return result + given["r"].astype(np.float32) if self.has("residual") else result

    def _linear(self, x: Array, name: str, given: dict[str, Array]) -> Array:
        weights = given[f"w{name}"].astype(np.float32)
        for part in ("zero", "scale"):
            blocks = given.get(f"w{name}_{part}")
            if blocks is not None:
                spread = np.repeat(blocks.astype(np.float32), self.k // blocks.shape[1], axis=1)
                weights = weights - spread if part == "zero" else weights * spread
        result = x @ weights.T
        return result + given["bias"].astype(np.float32) if self.has("bias") else result

    def error(self, got: Array, wanted: Array) -> float:
        """The largest difference, in units of what rounding to the dtype may make of it."""
        unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[self.dtype]
        allowed = 4 * unit * (np.abs(wanted) + np.sqrt(np.mean(wanted * wanted)) + 0.05)
        away = np.abs(got.astype(np.float32) - wanted)
        return float(np.max(np.where(np.isnan(away), np.inf, away) / allowed, initial=0.0))
