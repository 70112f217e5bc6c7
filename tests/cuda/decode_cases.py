"""Modules with one attention of new tokens over caches, and random arrays for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from irc.backends.reference import evaluate
from irc.ir.core import Module, Value
from irc.ir.dtypes import numpy_dtype
from irc.ops import Attention
from irc.text.parser import parse_module

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """An attention as models have it: `heads` query heads of `size` features on `key_heads`.

    `form`: whether q, k and v are parts of one value ("joined") or three ("apart"); "read": only
    q is new, and the caches are read; "tokens": keys and values are tokens, as of an encoder.
    """

    heads: int
    key_heads: int
    size: int
    batch: int
    capacity: int
    past: tuple[int, ...]
    form: str = "joined"
    dtype: str = "bf16"
    rope: str | None = ""
    options: str = ", causal"
    lengths: tuple[int, ...] = ()
    sinks: str = ""  # their dtype
    index: str = "i32"
    norm: str | None = None  # rms_norm of the heads of q and k
    tokens: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the symbols."""
        return {"B": self.batch, "S": self.tokens, "C": self.capacity}

    def module(self) -> Module:
        """The module; its last function result is that of the attention."""
        return parse_module(self.text())

    def text(self) -> str:
        """The module as text."""
        kind, d = self.dtype, self.size
        wide, narrow = self.heads * d, self.key_heads * d
        cache = f"{kind}[B, {self.key_heads}, C, {d}]"
        tokens = f"{kind}[B, C, {narrow}]"
        held = tokens if self.form == "tokens" else cache
        q, row = f"{kind}[B, S, {wide}]", f"{kind}[B, S, {narrow}]"
        lines: list[str] = []
        inputs = [f"%x: {q}"]
        names = ["x", "y", "z"]
        if self.form == "joined":
            inputs = [f"%qkv: {kind}[B, S, {wide + 2 * narrow}]"]
            parts = f"{{dim=2, sizes=[{wide}, {narrow}, {narrow}]}}"
            lines += [f"%x, %y, %z = split %qkv {parts} : {q}, {row}, {row}"]
        elif self.form == "apart":
            inputs += [f"%y: {row}", f"%z: {row}"]
        if self.norm is not None:
            inputs += [f"%gq: {kind}[{d}]", f"%gk: {kind}[{d}]"]
            both = [("x", "gq", self.heads), ("y", "gk", self.key_heads)]
            for name, gain, count in both[: 1 + self.updates]:
                whole, apart = f"[B, S, {count * d}]", f"[B, S, {count}, {d}]"
                options = f"{{eps=0.01{self.norm}}}"
                lines += [
                    f"%{name}1 = reshape %{name} {{shape={apart}}} : {kind}{apart}",
                    f"%{name}2 = rms_norm %{name}1, %{gain} {options} : {kind}{apart}",
                    f"%{name}3 = reshape %{name}2 {{shape={whole}}} : {kind}{whole}",
                ]
            names = ["x3", "y3", "z"]
        if self.rope is not None:
            turned = f"{{head_dim={d}{self.rope}}}"
            lines += [f"%q = rope %{names[0]}, %positions {turned} : {q}"]
            lines += [f"%k = rope %{names[1]}, %positions {turned} : {row}"] if self.updates else []
            names = ["q", "k", "z"]
        keys, values = "k0", "v0"
        if self.updates:
            lines += [f"%k1 = cache_update %k0, %{names[1]}, %past : {cache}"]
            lines += [f"%v1 = cache_update %v0, %{names[2]}, %past : {cache}"]
            keys, values = "k1", "v1"
        lengths = ", lengths=%lengths" if self.lengths else ""
        past = ", past=%past" if self.past else ""
        sinks = ", sinks=%sinks" if self.sinks else ""
        lines += [
            f"%mixed = attention %{names[0]}, %{keys}, %{values}{past}{lengths}{sinks} "
            f"{{head_dim={d}{self.options}}} : {q}",
            f"return %mixed{', %k1, %v1' if self.updates else ''}",
        ]
        inputs += [f"%positions: {self.index}[B, S]"] if self.rope is not None else []
        inputs += [f"%past: {self.index}[B]"] if self.past else []
        inputs += [f"%lengths: {self.index}[B]"] if self.lengths else []
        inputs += [f"%sinks: {self.sinks}[{self.heads}]"] if self.sinks else []
        inputs += [f"%k0: {held}", f"%v0: {held}"]
        results = [f"mixed: {q}"]
        if self.updates:
            results += [f"k0: {cache} aliases %k0", f"v0: {cache} aliases %v0"]
        body = "\n    ".join(lines)
        head = f"func @main({', '.join(inputs)}) -> ({', '.join(results)})"
        dims = "dims(B=1:1:64, S=1:1:64, C=1:64:131072)"
        return f"module @m {dims} {{\n  {head} {{\n    {body}\n  }}\n}}\n"

    @property
    def result_shape(self) -> tuple[int, int, int]:
        """The shape of the attention's result."""
        return self.batch, self.tokens, self.heads * self.size

    @property
    def numpy(self) -> Any:
        """The dtype of q, k and v in numpy."""
        return numpy_dtype(self.dtype)

    @property
    def updates(self) -> bool:
        """Whether the caches get a row."""
        return self.form in ("joined", "apart")


def attention_of(module: Module) -> Attention:
    """The attention of a module."""
    (found,) = (op for op in module.main if isinstance(op, Attention))
    return found


def arrays_of(case: Case, module: Module, random: np.random.Generator) -> Mapping[Value, Array]:
    """Random arguments: scores of a few units, and NaN in caches where no query looks."""
    found: dict[Value, Array] = {}
    for value in module.main.args:
        shape = tuple(case.sizes.get(str(n), n) for n in value.type.shape)
        name = value.name or ""
        numbers = {"past": case.past, "lengths": case.lengths, "positions": case.past}
        if name in numbers:
            chosen = np.resize(numbers[name] or random.integers(0, 99, case.batch), case.batch)
            if name == "positions":
                chosen = chosen[:, None] + np.arange(case.tokens)
            found[value] = chosen.astype(numpy_dtype(case.index))
            continue
        array = random.uniform(-1, 1, shape).astype(np.float32)
        if name in ("qkv", "x"):
            array[..., : case.heads * case.size] *= 6
        if name in ("k0", "v0") and case.updates:
            for row, past in enumerate(np.resize(case.past, case.batch)):
                array[row, :, int(past) + case.tokens :] = np.nan
        found[value] = array.astype(numpy_dtype(value.type.dtype))
    return found


def check_results(
    case: Case, module: Module, inputs: Mapping[Value, Array], got: Mapping[Value, Array]
) -> None:
    """Compare the results with the reference: rows of caches that nothing writes are the same."""
    by_name = {str(value.name): array for value, array in inputs.items()}
    wanted = evaluate(module, by_name)
    mixed, *caches = module.main.returned
    near(got[mixed], wanted["mixed"], 0.03)
    for name, value in zip(("k0", "v0"), caches, strict=False):
        new, old = got[value].copy(), wanted[name].copy()
        for row, past in enumerate(np.resize(case.past, case.batch)):
            added = slice(past, past + case.tokens)
            near(new[row, :, added], old[row, :, added], 0.01)
            new[row, :, added] = old[row, :, added] = 0
        assert np.array_equal(new.view(np.uint16), old.view(np.uint16)), name


def near(got: Array, want: Array, tolerance: float) -> None:
    """Raise unless two arrays have about the same elements."""
    np.testing.assert_allclose(
        got.astype(np.float32), want.astype(np.float32), rtol=tolerance, atol=tolerance
    )
