"""Modules with one attention, mostly of new tokens over caches, and random arrays for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.plan.regime import Regime, Target
from irc.backends.cuda.plan.template import Launcher, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module, Op, Value
from irc.ir.dtypes import numpy_dtype
from irc.text.parser import parse_module
from tests.cuda.regimes import regime_of

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
    multiprocessors: int = 132  # fewer: blocks share out keys by lengths
    codes: str = ""  # the dtype of caches whose numbers are half of their codes, which are read

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the symbols."""
        return {"B": self.batch, "S": self.tokens, "C": self.capacity}

    def module(self) -> Module:
        """The module, with a fused_attention where caches are updated; its result is the first."""
        return parse_module(self.text())

    def regime(self, module: Module) -> Regime:
        """The regime of the sizes; only the caches are written during a step."""
        regime = regime_of(self.sizes, Target(multiprocessors=self.multiprocessors))
        regime.constants = [arg for arg in module.main.args if arg.name not in ("k0", "v0")]
        return regime

    def text(self) -> str:
        """The module as text."""
        kind, d = self.dtype, self.size
        wide, narrow = self.heads * d, self.key_heads * d
        q, row = f"{kind}[B, S, {wide}]", f"{kind}[B, S, {narrow}]"
        cache = f"{kind}[B, {self.key_heads}, C, {d}]"
        held = f"{kind}[B, C, {narrow}]" if self.form == "tokens" else cache
        inputs, lines = [f"%x: {q}"], list[str]()
        caches = "%k0, %v0"
        if self.codes:
            held, caches = f"{self.codes}[B, {self.key_heads}, C, {d}]", "%kd, %vd"
            lines += ["%half = full {value=0.5, shape=[1, 1, 1, 1]} : f32[1, 1, 1, 1]"]
            for each in ("k", "v"):
                lines += [f'%{each}d = dequantize %{each}0, %half {{dtype="{kind}"}} : {cache}']
        if self.form == "joined":
            inputs = [f"%qkv: {kind}[B, S, {wide + 2 * narrow}]"]
            parts = f"{{dim=2, sizes=[{wide}, {narrow}, {narrow}]}}"
            lines += [f"%x, %y, %z = split %qkv {parts} : {q}, {row}, {row}"]
        elif self.form == "apart":
            inputs += [f"%y: {row}", f"%z: {row}"]
        named = {"positions": f"{self.index}[B, S]"} if self.rope is not None else {}
        if self.norm is not None:
            named |= {"q_norm": f"{kind}[{d}]", "k_norm": f"{kind}[{d}]"}
        named |= {name: f"{self.index}[B]" for name in ("past", "lengths") if getattr(self, name)}
        named |= {"sinks": f"{self.sinks}[{self.heads}]"} if self.sinks else {}
        inputs += [f"%{name}: {type}" for name, type in named.items()]
        inputs += [f"%k0: {held}", f"%v0: {held}"]
        options = f"head_dim={d}{self.options}{self.rope or ''}"
        options += f", eps=0.01{self.norm}" if self.norm is not None else ""
        results = [f"mixed: {q}"]
        given = "".join(f", {n}=%{n}" for n in named if n != "past" or not self.updates)
        if self.updates:
            results += [f"{name}: {cache} aliases %{name}" for name in ("k0", "v0")]
            call = f"%mixed, %k1, %v1 = fused_attention %x, %y, %z, %k0, %v0, %past{given}"
            lines += [f"{call} {{{options}}} : {q}, {cache}, {cache}", "return %mixed, %k1, %v1"]
        else:
            call = f"%mixed = attention %x, {caches}{given}"
            lines += [f"{call} {{{options}}} : {q}", "return %mixed"]
        body = "\n    ".join(lines)
        head = f"func @main({', '.join(inputs)}) -> ({', '.join(results)})"
        dims = "dims(B=1:1:64, S=1:1:64, C=1:64:131072)"
        return f"module @m {dims} {{\n  {head} {{\n    {body}\n  }}\n}}\n"

    @property
    def updates(self) -> bool:
        """Whether the caches get a row."""
        return self.form in ("joined", "apart")


def operations_of(module: Module) -> list[Op]:
    """The operations of a module that may have launches of their own."""
    return [op for op in module.main if "attention" in op.opname or "rope" in op.opname]


def made_by(maker: Launcher, op: Op, regime: Regime) -> list[Template]:
    """The launches that a maker has for an operation."""
    made = maker(op, regime)
    assert made is not None and not isinstance(made, str), made
    return [each for each in made if isinstance(each, Template)]


def arrays_of(case: Case, module: Module, random: np.random.Generator) -> Mapping[Value, Array]:
    """Random arguments: scores of a few units, and NaN in rows of caches that no step wrote."""
    arrays: dict[Value, Array] = {}
    for value in module.main.args:
        shape = tuple(case.sizes.get(str(n), n) for n in value.type.shape)
        name = value.name or ""
        numbers = {"past": case.past, "lengths": case.lengths, "positions": case.past}
        if name in numbers:
            chosen = np.resize(numbers[name] or random.integers(0, 99, case.batch), case.batch)
            if name == "positions":
                chosen = chosen[:, None] + np.arange(case.tokens)
            arrays[value] = chosen.astype(numpy_dtype(case.index))
            continue
        array = random.uniform(-1, 1, shape).astype(np.float32)
        if name in ("qkv", "x"):
            array[..., : case.heads * case.size] *= 6
        if value.type.dtype == "i8":
            array *= 2.9
        if name in ("k0", "v0") and case.codes == "f8e4m3":
            for row, past in enumerate(np.resize(case.past, case.batch)):
                array[row, :, past + case.tokens :] = np.nan
        if name in ("k0", "v0") and case.updates:
            for row, past in enumerate(np.resize(case.past, case.batch)):
                array[row, :, int(past) :] = np.nan
        arrays[value] = array.astype(numpy_dtype(value.type.dtype))
    return arrays


def check_results(
    case: Case, module: Module, inputs: Mapping[Value, Array], got: Mapping[Value, Array]
) -> None:
    """Compare the results with the reference: rows of caches that nothing writes are the same."""
    wanted = evaluate(module, {str(value.name): array for value, array in inputs.items()})
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
