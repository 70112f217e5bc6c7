"""`Stored`: the tensors of a checkpoint whose names or layouts are not those of the parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from ...ir.core import Weight
from ...ir.dims import Shape
from ...weights import ConcatRef, Ref, Slice, StridedRef, Transpose, UnboundRef

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Stored:
    """The tensor `key` of a checkpoint holds the parameter whose name is `pattern`.

    Each `*` of the pattern stands for a number, which takes the place of a `*` in the key. Both may
    be prefixes: what follows in the name, such as `.weight`, follows in the key. Of a joined tensor
    with `total` outputs the parameter is the outputs in `ranges`, in that order, of each range
    every output number `step`. `transposed`: the tensor is [in, out], as in GPT-2, where the
    parameter is [out, in]. `dim` is the dimension of the outputs: 1 behind that of experts.
    """

    pattern: str
    key: str
    ranges: Ranges = ()
    total: int = 0
    transposed: bool = False
    dim: int = 0
    step: int = 1

    def reference(self, name: str, shape: Shape) -> Ref | None:
        """Where a checkpoint has the parameter `name` of this shape; None for another pattern."""
        pattern = re.escape(self.pattern).replace(r"\*", r"(\d+)")
        match = re.match(rf"{pattern}(?=\.|$)", name)
        if match is None:
            return None
        key = self.key
        for number in match.groups():
            key = key.replace("*", number, 1)
        return self._layout(key + name[match.end() :], shape)

    def _layout(self, key: str, shape: Shape) -> Ref:
        """The tensor `key` as a parameter of this shape."""
        dim, last = self.dim, len(shape) - 1
        transposed = self.transposed and last > dim
        turn = Transpose((*range(dim), last, dim)) if transposed else None
        if not self.ranges:
            return UnboundRef(key).then(turn) if turn else UnboundRef(key)
        sizes = [size for size in shape if isinstance(size, int)]
        sizes[dim] = self.total
        if turn:
            sizes[dim], sizes[last] = sizes[last], sizes[dim]
            dim = last
        stored = UnboundRef(key, tuple(sizes))
        parts = [self._part(stored, dim, outputs, len(sizes)) for outputs in self.ranges]
        parts = [part.then(turn) if turn else part for part in parts]
        return parts[0] if len(parts) == 1 else ConcatRef(tuple(parts), self.dim)

    def _part(self, stored: Ref, dim: int, outputs: tuple[int, int], ndim: int) -> Ref:
        """Some outputs of a joined tensor, which are its dimension `dim`."""
        if self.step > 1:
            return StridedRef(stored, dim, *outputs, self.step)
        return stored.then(Slice(tuple(outputs if i == dim else None for i in range(ndim))))


LAYER = "model.layers.*."  # what the names of parameters of a decoder's layers begin with
ATTENTION, MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."
QKV = "q_proj k_proj v_proj"


def renamed(
    names: Mapping[str, str], key: str = LAYER, own: str = LAYER, transposed: bool = False
) -> list[Stored]:
    """Parameters whose names below `own` a checkpoint has as other names below `key`."""
    return [
        Stored(own + name, key + stored, transposed=transposed) for name, stored in names.items()
    ]


def joined(own: str, names: str, key: str, ranges: Sequence[Ranges], **layout: Any) -> list[Stored]:
    """Parameters, of these names below `own`, that share the tensor `key`: each has some ranges.

    `layout` are other fields of Stored.
    """
    total = max(end for part in ranges for _, end in part)
    pairs = zip(names.split(), ranges, strict=True)
    return [Stored(own + name, key, part, total, **layout) for name, part in pairs]


def in_turn(*sizes: int) -> list[Ranges]:
    """The ranges of parts of these sizes that follow each other in a joined tensor."""
    ends = list(accumulate(sizes, initial=0))
    return [[part] for part in pairwise(ends)]


def by_group(heads: int, kv_heads: int, size: int) -> list[Ranges]:
    """The ranges of queries, keys and values in a tensor [kv_heads, heads / kv_heads + 2, size].

    Behind the query heads of a group are its key head and its value head.
    """
    queries = heads // kv_heads * size
    begins = [group * (queries + 2 * size) for group in range(kv_heads)]
    parts = in_turn(queries, size, size)
    return [[(at + begin, at + end) for at in begins] for [(begin, end)] in parts]


def megatron_layers(config: Any, key: str, attention: str) -> list[Stored]:
    """The layers below `key` as Megatron-LM names them; `attention` is the name of attention.

    What has other names below `key` is to precede these entries. Shoeybi et al., 2019.
    """
    names = {
        "self_attn.o_proj": f"{attention}.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    qkv = by_group(config.num_attention_heads, config.kv_heads, config.head_size)
    return [*renamed(names, key), *joined(ATTENTION, QKV, f"{key}{attention}.query_key_value", qkv)]


# where a checkpoint has the parameters of a model, for some families by its sizes
Layout: TypeAlias = Sequence[Stored] | Callable[[Any], Sequence[Stored]]


def laid_out(layout: Layout, config: Any) -> Sequence[Stored]:
    """The entries of a layout for a model of these sizes."""
    return layout(config) if callable(layout) else layout


def stored_references(weights: Mapping[str, Weight], tensors: Iterable[Stored]) -> dict[str, Ref]:
    """The references of the weights that have an entry in `tensors`, of which the first fits."""
    entries, references = list(tensors), dict[str, Ref]()
    for name, weight in weights.items():
        fitting = (entry.reference(name, weight.type.shape) for entry in entries)
        if (reference := next(filter(None, fitting), None)) is not None:
            references[name] = reference
    return references
