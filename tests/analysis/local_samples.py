"""Samples in the local view: random modules after `localize`, and blocks with every collective."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np

import irc.passes
from examples import llama
from irc.errors import Error
from irc.frontends import random_weights
from irc.ir.dims import bind
from irc.ir.dtypes import numpy_dtype
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from irc.testing.wanted import Arrays, Wanted
from irc.text import parse_module
from tests.matrix.checking import Case
from tests.matrix.test_passes import SCHEMES, case_of, finite

assert irc.passes  # importing it registers the passes
MESHES = ("tp=2", "tp=3", "tp=4", "dp=2, tp=2", "dp=2, tp=3", "cp=2, ep=1, tp=2", "dp=3, tp=1")

# Of 12 rows and columns, which every group size divides: $p of them on a rank of the axis $a. $x is
# the value before a block and %y$n that of the block, the same on all ranks; $o is a rank.
WEIGHTS = """
weight @up.$a : f32[$q, 12] of f32[24@$a, 12] = random("up", 3, 0.3, [24, 12]).shard(0, $a)
weight @down.$a : f32[12, $q] of f32[12, 24@$a] = random("down", 3, 0.3, [12, 24]).shard(1, $a)
weight @columns.$a : f32[$p, 12] of f32[12@$a, 12] = random("c", 3, 0.3, [12, 12]).shard(0, $a)
weight @table.$a : f32[$r, 12] of f32[36@$a, 12] = random("table", 3, 0.3, [36, 12]).shard(0, $a)"""
TERMS = """
%h$n = linear $x, @up.$a : f32[12, $q] of f32[12, 24@$a]
%a$n = silu %h$n : f32[12, $q] of f32[12, 24@$a]
%t$n = linear %a$n, @down.$a : f32[12, 12]{sum $a}"""
COLUMNS = "\n%c$n = linear $x, @columns.$a : f32[12, $p] of f32[12, 12@$a]"
OWN = """
%r$n = rank {axis="$a"} : i32[]{varies $a}
%f$n = cast %r$n {dtype="f32"} : f32[]{varies $a}
%o$n = add $x, %f$n : f32[12, 12]{varies $a}"""
BLOCKS = (
    TERMS + "\n%y$n = all_reduce %t$n {$over} : f32[12, 12]",
    TERMS + """
%l$n = neg %t$n : f32[12, 12]{sum $a}
%s$n = all_reduce %t$n {$over} : f32[12, 12]
%m$n = all_reduce %l$n {$over} : f32[12, 12]
%y$n = mul %s$n, %m$n : f32[12, 12]""",
    COLUMNS + "\n%y$n = all_gather %c$n {$over, dim=1} : f32[12, 12]",
    """
%r$n = rank {axis="$a"} : i32[]{varies $a}
%k$n = constant {values=[$r], dtype="i32"} : i32[]
%s$n = mul %r$n, %k$n : i32[]{varies $a}
%i$n = sub %ids, %s$n : i32[12]{varies $a}
%e$n = embedding %i$n, @table.$a : f32[12, 12]{sum $a}
%y$n = all_reduce %e$n {$over} : f32[12, 12]""",
    TERMS + """
%s$n = reduce_scatter %t$n {$over, dim=0} : f32[$p, 12] of f32[12@$a, 12]
%b$n = silu %s$n : f32[$p, 12] of f32[12@$a, 12]
%y$n = all_gather %b$n {$over, dim=0} : f32[12, 12]""",
    COLUMNS + """
%s$n = all_to_all %c$n {$over, split=0, concat=1} : f32[$p, 12] of f32[12@$a, 12]
%b$n = silu %s$n : f32[$p, 12] of f32[12@$a, 12]
%y$n = all_gather %b$n {$over, dim=0} : f32[12, 12]""",
    OWN + '\n%y$n = all_reduce %o$n {$over, op="max"} : f32[12, 12]',
    OWN + "\n%y$n = broadcast %o$n {$over, root=$o} : f32[12, 12]",
    TERMS + """
%s$n = reduce %t$n {$over, root=$o} : f32[12, 12]{varies $a}
%y$n = broadcast %s$n {$over, root=$o} : f32[12, 12]""",
    COLUMNS + """
%s$n = collective_gather %c$n {$over, dim=1, root=$o} : f32[12, 12]{sum $a}
%y$n = all_reduce %s$n {$over} : f32[12, 12]""",
    """
%s$n = collective_scatter $x {$over, dim=1} : f32[12, $p] of f32[12, 12@$a]
%b$n = silu %s$n : f32[12, $p] of f32[12, 12@$a]
%y$n = all_gather %b$n {$over, dim=1} : f32[12, 12]""",
    """
%s$n = reduce_sum %part_$a {dims=[0]} : f32[12]{sum $a}
%m$n = all_reduce %s$n {$over} : f32[12]
%y$n = add $x, %m$n : f32[12, 12]""",
)  # fmt: skip
AFTER = ("add $x, %y$n", "rms_norm %y$n, @norm")


@dataclass(frozen=True)
class Sample:
    """The text of a local module, its global inputs, and its global results."""

    name: str
    text: str
    inputs: Arrays
    wanted: Wanted


def axis_names(axis: str, size: int) -> dict[str, object]:
    """What the texts of blocks over an axis have in place of its names."""
    over = f'axis="{axis}", group_size={size}'
    return {"a": axis, "p": 12 // size, "q": 24 // size, "r": 36 // size, "over": over}


def block_text(rng: random.Random) -> str:
    """A module of two to five blocks, each operation with a source line of its own."""
    mesh = rng.choice(MESHES)
    axes = [(name, size) for name, size in Mesh.parse(mesh).axes if size > 1]
    body, value = "", "%x"
    for number in range(rng.randint(2, 5)):
        axis, size = rng.choice(axes)
        names = {"n": number, "x": value, "o": rng.randrange(size)} | axis_names(axis, size)
        body += Template(rng.choice(BLOCKS) + f"\n%z$n = {rng.choice(AFTER)}").substitute(names)
        body += " : f32[12, 12]"
        value = f"%z{number}"
    layouts = {name: f"f32[{12 // size}, 12] of f32[12@{name}, 12]" for name, size in axes}
    body += "".join(f"\n%mine_{a} = silu %part_{a} : {layouts[a]}" for a in layouts)
    lines = [f'{line} loc("model.py":{i})' for i, line in enumerate(body.splitlines()[1:], 1)]
    weights = "".join(Template(WEIGHTS).substitute(axis_names(*axis)) for axis in axes)
    arguments = ", ".join(f"%part_{name}: {layout}" for name, layout in layouts.items())
    results = ", ".join(f"mine_{name}: {layout}" for name, layout in layouts.items())
    return f"""module @blocks local mesh({mesh}) {{
{weights}
weight @norm : f32[12] = random("norm", 3, 0.3)
func @forward(%x: f32[12, 12], %ids: i32[12], {arguments}) -> (y: f32[12, 12], {results}) {{
{chr(10).join(lines)}
return {", ".join([value, *(f"%mine_{name}" for name in layouts)])} }} }}"""


def block_sample(seed: int) -> Sample:
    """A random module of blocks; the same one for the same seed."""
    text, numbers = block_text(random.Random(seed)), np.random.default_rng(seed)
    names = [str(arg.name) for arg in parse_module(text).main.args]
    inputs = {name: numbers.standard_normal((12, 12), "f4") for name in names}
    inputs["ids"] = numbers.integers(0, 36, 12).astype("i4")
    return Sample(f"blocks {seed}", text, inputs, Case(text, inputs, dtype="f32").wanted())


def matrix_sample(seed: int, folder: Path) -> Sample | None:
    """A random module of the matrix after `localize`; None where a pass refuses it, and where
    rounding, or infinities that meet zeros in partial sums, leave nothing to compare."""
    case = case_of(seed)
    wanted, module = case.wanted(), case.module()
    if not (wanted.stable and finite(case)):
        return None
    scheme = random.Random(seed).choice(SCHEMES)
    passes = f"{case.shard(folder, module)}, rewrite-embeddings{{scheme={scheme}}}, pipeline"
    try:
        run_pipeline(module, case.pipeline(f"{passes}, localize", folder))
    except Error:
        return None
    return Sample(f"matrix {seed}", str(module), case.inputs, wanted)


def decoder_sample(seed: int) -> Sample:
    """The example model on a prompt, with empty caches."""
    rng = random.Random(seed)
    module = random_weights(llama.build(layers=1, hidden=16, vocab=32, context=64), 3)
    sizes, inputs = {"B": 2, "S": 8, "T": 8, "C": 12}, dict[str, np.ndarray]()
    for arg in module.main.args:
        shape = tuple(bind(size, sizes) for size in arg.type.shape)
        inputs[str(arg.name)] = np.zeros(shape, numpy_dtype(arg.type.dtype))
    inputs["input_ids"][:] = np.random.default_rng(seed).integers(0, 30, (2, 8))
    inputs["positions"][:] = inputs["logit_positions"][:] = np.arange(8)
    wanted = Case(str(module), inputs, dtype="f32").wanted()
    mesh = rng.choice(("tp=2", "dp=2,tp=2", "ep=2,tp=2", "tp=4", "dp=2,ep=2,tp=2"))
    options = f'mesh="{mesh}"' + rng.choice(("", ", sequence=true"))
    passes = f"inline, canonicalize, cse, shard{{{options}}}, localize, fuse-collectives, dce"
    run_pipeline(module, passes)
    return Sample(f"decoder {options}", str(module), inputs, wanted)
