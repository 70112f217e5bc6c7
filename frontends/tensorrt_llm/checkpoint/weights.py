"""Joins what the ranks of a checkpoint hold of a weight into one reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ....errors import Error, did_you_mean
from ....ir.core import Weight
from ....ir.types import TensorType
from ....weights import Cast, ConcatRef, Ref, Slice
from ...huggingface.quantized import Tensors
from ...huggingface.quantized.parts import FLOATS, Part
from ...models.decoder import DecoderConfig
from ..quantization import QuantConfig
from .config import Layout
from .quantized import Joined, read_layer
from .ranks import Ranks


@dataclass(frozen=True)
class Place:
    """Where the ranks of a stage have a matrix or vector: its key, and the dimension they split.

    `dim` None: every rank has all of it. The rows of a rank are `sections` of several tensors, of
    which `index` is this one. Every `step`-th rank has another part; the ranks between repeat it.
    """

    key: str
    dim: int | None = None
    sections: tuple[int, ...] = ()
    index: int = 0
    step: int = 1

    def of(self, ranks: Sequence[Tensors]) -> Sequence[Tensors]:
        """The ranks whose parts make up the tensor."""
        return ranks[:1] if self.dim is None else ranks[:: self.step]

    def section(self, part: Part) -> Part:
        """The rows of this tensor in what a rank holds; scales of all rows stay as they are."""
        if not self.sections or part.shape[0] != sum(self.sections):
            return part
        begin = sum(self.sections[: self.index])
        return rows(part, begin, begin + self.sections[self.index])

    def joined(self, parts: Sequence[Part], shape: Sequence[int]) -> Part:
        """The parts of the ranks as one tensor, without the padding behind `shape`."""
        found = concatenated([self.section(part) for part in parts], self.dim or 0)
        padded = self.dim in (None, 0) and found.shape[0] > shape[0] and found.shape[0] != 1
        return rows(found, 0, shape[0]) if padded else found


def rows(part: Part, begin: int, end: int) -> Part:
    """Some rows of a tensor."""
    rest = part.shape[1:]
    step = Slice(((begin, end), *(None for _ in rest)))
    return Part(part.ref.then(step), part.dtype, (end - begin, *rest))


def concatenated(parts: Sequence[Part], dim: int) -> Part:
    """Tensors joined along a dimension."""
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = [*first.shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Part(ConcatRef(tuple(part.ref for part in parts), dim), first.dtype, tuple(shape))


class Weights:
    """References for the weights of a model; `misfits` and `missing` are about the others.

    `missing` has the ranks without a tensor by its key.
    """

    def __init__(self, ranks: Ranks, config: DecoderConfig, quantized: QuantConfig) -> None:
        self.ranks, self.config, self.quantized = ranks, config, quantized
        self.missing: dict[str, list[str]] = {}
        self.misfits: list[str] = []

    def find(self, weight: Weight) -> Ref | Joined | None:
        """The reference of a weight, or its quantized layer; None where tensors do not fit."""
        owner, _, kind = weight.name.rpartition(".")
        if "block_sparse_moe.experts" in owner:
            return self._experts(weight, owner, kind)
        tensors, prefix, module = self._stage(owner)
        place = self._place(module, tensors, prefix)
        if kind == "bias" and place.dim == 1:
            place = replace(place, dim=None)
        place = replace(place, key=f"{prefix}{place.key}")
        if kind == "weight":
            sizes = sizes_of(weight)
            found = read_layer(place, place.of(tensors), sizes, self.quantized)
            if found is not None:
                return found
        return self._float(place, f"{place.key}.{kind}", tensors, weight)

    def missing_lines(self, known: Iterable[str]) -> list[str]:
        """A line per missing tensor: its key, the most similar known one, and the ranks."""
        known = list(known)
        return [
            f"{key} in {', '.join(dict.fromkeys(files))}{did_you_mean(key, known)}"
            for key, files in self.missing.items()
        ]

    def _stage(self, owner: str) -> tuple[list[Tensors], str, str]:
        """(the ranks that have a module, the beginning of its keys, its name without that)."""
        layer = owner.removeprefix("model.layers.")
        if layer == owner:
            last = self.ranks.layout.pp - 1
            return self.ranks.of_stage(0 if owner.endswith("embed_tokens") else last), "", owner
        index, _, module = layer.partition(".")
        return *self.ranks.layer(int(index)), module

    def _place(self, module: str, ranks: Sequence[Tensors], prefix: str) -> Place:
        layout, config = self.ranks.layout, self.config
        match module:
            case "model.embed_tokens":
                return Place("transformer.vocab_embedding", layout.table_dim)
            case "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj":
                return _qkv("qkv".index(module[-6]), layout, config)
            case "mlp.gate_proj" | "mlp.up_proj" if f"{prefix}mlp.fused_fc.weight" in ranks[0]:
                width = config.intermediate_size // layout.tp
                return Place("mlp.fused_fc", 0, (width, width), int(module == "mlp.gate_proj"))
            case _:
                return _PLACES[module]

    def _float(
        self, place: Place, key: str, ranks: Sequence[Tensors], weight: Weight
    ) -> Ref | None:
        """The reference of a weight in a float dtype, cast to that of the model."""
        shape, dtype = sizes_of(weight), weight.type.dtype
        parts = [self._part(each, key, dtype) for each in place.of(ranks)]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or not self._fits(place, key, present, shape):
            return None
        return place.joined(present, shape).ref

    def _part(self, tensors: Tensors, key: str, dtype: str) -> Part | None:
        """What a rank holds under a key, cast to a dtype."""
        if key not in tensors:
            self.missing.setdefault(key, []).append(tensors.checkpoint.file(""))
            return None
        found = tensors.info(key)
        if found.dtype not in (*FLOATS, "f64"):
            kind = TensorType(found.dtype, found.shape)
            self.misfits.append(f"{key} is {kind}, which does not convert to {dtype}")
            return None
        part = tensors.take(key, found.dtype)
        ref = part.ref if found.dtype == dtype else part.ref.then(Cast(dtype))
        return Part(ref, dtype, part.shape)

    def _fits(self, place: Place, key: str, parts: Sequence[Part], shape: Sequence[int]) -> bool:
        """Whether the parts of the ranks make up the shape; adds a line where they do not."""
        dim, count, wanted = place.dim, len(parts), [*shape]
        if place.sections:
            wanted[0] = sum(place.sections)
        elif dim is not None:
            wanted[dim] = -(-shape[dim] // count)
        if place.key in PADDED and dim in (None, 0):
            found = sum(part.shape[0] for part in parts)
            fits = found >= shape[0] and all(p.shape[1:] == tuple(shape[1:]) for p in parts)
        else:
            own = place.sections[place.index] if place.sections else wanted[dim or 0]
            fits = dim is None or own * count == shape[dim]
            fits = fits and all(part.shape == tuple(wanted) for part in parts)
        if not fits:
            self.misfits.append(_misfit(key, parts, wanted, shape))
        return fits

    def _experts(self, weight: Weight, owner: str, kind: str) -> Ref | None:
        """The stacked experts of a layer: `fc` has up over gate, `proj` is down."""
        ranks, prefix, _ = self._stage(owner)
        layout, (count, outer, inner) = self.ranks.layout, sizes_of(weight)
        width, dim = (inner, 2) if kind == "down" else (outer, 1)
        split = layout.tp // layout.moe_ep
        key = f"{prefix}mlp.{'proj' if kind == 'down' else 'fc'}.weight"
        parts = [self._part(each, key, weight.type.dtype) for each in ranks]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None
        local = width // split
        wanted = [count // layout.moe_ep, outer, inner]
        wanted[dim] = local if kind == "down" else 2 * local
        if any([*part.shape] != wanted for part in present) or width % split:
            self.misfits.append(f"{key}: found {[*present[0].shape]}, expected {wanted} on a rank")
            return None
        if kind != "down":
            begin = local if kind == "gate" else 0
            half = Slice((None, (begin, begin + local), None))
            shape = (wanted[0], local, inner)
            present = [Part(p.ref.then(half), p.dtype, shape) for p in present]
        groups = [present[i :: layout.moe_ep] for i in range(layout.moe_ep)]
        return concatenated([concatenated(group, dim) for group in groups], 0).ref


PADDED = ("transformer.vocab_embedding", "lm_head")
_PLACES = {
    "model.norm": Place("transformer.ln_f"),
    "lm_head": Place("lm_head", 0),
    "input_layernorm": Place("input_layernorm"),
    "post_attention_layernorm": Place("post_layernorm"),
    "self_attn.q_norm": Place("attention.q_layernorm"),
    "self_attn.k_norm": Place("attention.k_layernorm"),
    "self_attn.o_proj": Place("attention.dense", 1),
    "mlp.gate_proj": Place("mlp.fc", 0),
    "mlp.up_proj": Place("mlp.gate", 0),
    "mlp.down_proj": Place("mlp.proj", 1),
    "block_sparse_moe.gate": Place("mlp.router"),
}


def sizes_of(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight."""
    return tuple(size for size in weight.type.shape if isinstance(size, int))


def _misfit(key: str, parts: Sequence[Part], wanted: list[int], shape: Sequence[int]) -> str:
    """A line about a tensor of a wrong shape: key, found, expected."""
    found = " and ".join(dict.fromkeys(str([*part.shape]) for part in parts))
    count = f" on each of {len(parts)} ranks" if len(parts) > 1 else ""
    return f"{key}: found {found}, expected {wanted}{count}, which make up {[*shape]}"


def _qkv(index: int, layout: Layout, config: DecoderConfig) -> Place:
    """Queries, keys or values: a rank has its heads of each; a key head may be on several ranks."""
    tp, heads, size = layout.tp, config.kv_heads, config.head_size
    if config.num_attention_heads % tp or (heads % tp and tp % heads):
        raise Error(
            f"config.json: tp_size={tp} does not fit {config.num_attention_heads} heads with "
            f"{heads} key and value heads; TensorRT-LLM stores padding there, so convert with "
            "another tp_size, and give irc the mesh that you want"
        )
    own, shared = config.num_attention_heads // tp, -(-heads // tp)
    step = tp // heads if index and tp > heads else 1
    sections = (own * size, shared * size, shared * size)
    return Place("attention.qkv", 0, sections, index, step)
