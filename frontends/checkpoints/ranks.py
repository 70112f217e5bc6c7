"""`Ranks`: a folder of rank files as a checkpoint of transformers, whose tensors are joined.

`mlp.fc` is the activated matrix of a gated feed-forward, `mlp.gate` the other one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import Error
from ...ir.dtypes import dtype as dtype_called
from ...ir.types import TensorType
from ...weights import ConcatRef, Shard, Slice, Unsqueeze
from ...weights.safetensors import Tensor
from ..huggingface.files import Checkpoint
from ..huggingface.quantized import Layer, Method, Tensors
from ..huggingface.quantized.parts import FLOATS, Part, Sizes
from ..huggingface.quantized.scales import take_scales
from ..models.config_reader import ConfigReader

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_EXPERTS = "block_sparse_moe.experts"
# Module of the ranks -> its modules in transformers, whose rows a rank has above each other, and
# the dimension over which the ranks split the weight.
PLACES: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "transformer.vocab_embedding": (("model.embed_tokens",), None),
    "transformer.ln_f": (("model.norm",), None),
    "lm_head": (("lm_head",), 0),
    "input_layernorm": (("input_layernorm",), None),
    "post_layernorm": (("post_attention_layernorm",), None),
    "attention.q_layernorm": (("self_attn.q_norm",), None),
    "attention.k_layernorm": (("self_attn.k_norm",), None),
    "attention.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 0),
    "attention.dense": (("self_attn.o_proj",), 1),
    "mlp.fc": (("mlp.gate_proj",), 0),
    "mlp.gate": (("mlp.up_proj",), 0),
    "mlp.fused_fc": (("mlp.up_proj", "mlp.gate_proj"), 0),
    "mlp.proj": (("mlp.down_proj",), 1),
    "mlp.router": (("block_sparse_moe.gate",), None),
}
_PADDED = ("transformer.vocab_embedding", "lm_head")
# Tensors of a quantized layer by the names that ModelOpt gives them in folders of transformers.
_SCALES = {
    "weights_scaling_factor": "weight_scale",
    "per_channel_scale": "weight_scale",
    "weights_scaling_factor_2": "weight_scale_2",
    "activation_scaling_factor": "input_scale",
    "prequant_scaling_factor": "pre_quant_scale",
}


@dataclass(frozen=True)
class Layout:
    """How the ranks of a checkpoint hold its tensors; rank = stage * tp + rank within the stage.

    A rank has `qkv` heads of queries, keys and values; every `step`-th rank has other key heads.
    `table_dim` is the dimension over which the ranks of a stage split the embedding of `rows` rows,
    None if each has all of it. Experts are split over `moe_ep` groups of ranks, and their widths
    within these. `packed` codes of four bits may lie in other dtypes; weight-only codes of `bits`
    (0 for none) lie as mixed_gemm.py says.
    """

    tp: int
    pp: int
    layers: int
    rows: int
    qkv: tuple[int, int, int]
    step: int
    moe_ep: int = 1
    table_dim: int | None = None
    packed: bool = False
    bits: int = 0

    @property
    def ranks(self) -> int:
        """The number of rank files."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Whole:
    """A tensor that ranks hold as `owner`.`end`; they split the weight of the owner over `dim`.

    `rows` (begin, end, total) are those of this tensor in what a rank has, `most` those that are
    no padding. `bits` are those of weight-only codes.
    """

    ranks: Sequence[Tensors]
    owner: str
    end: str
    dim: int | None = None
    rows: tuple[int, int, int] = (0, 1, 1)
    most: int | None = None
    bits: int = 0

    @property
    def key(self) -> str:
        """The tensor in the ranks."""
        return f"{self.owner}.{self.end}"

    @property
    def dtype(self) -> str:
        """What the ranks store."""
        if self.bits and self.end == "weight":
            return f"i{self.bits}"
        return self.ranks[0].info(self.key).dtype

    def joined(self, dtype: str) -> Part:
        """The parts of all ranks, whose bytes are of a dtype."""
        parts, dim = [self._local(tensors, dtype) for tensors in self.ranks], self._dim
        if dim is None and self.end in _SCALES and self.end != "activation_scaling_factor":
            self._check_equal()
        if any(part.shape != parts[0].shape for part in parts):
            shapes = " and ".join(dict.fromkeys(str(part.type) for part in parts))
            raise Error(f"{self.key} is {shapes} on ranks of one stage; expected equal shapes")
        part = parts[0] if dim is None else _concatenated(parts, dim)
        is_padded = self.most is not None and part.shape and part.shape[0] > self.most
        return _rows(part, 0, self.most or 0) if is_padded else part

    @property
    def _dim(self) -> int | None:
        """The dimension over which the ranks split this tensor."""
        stored = self.ranks[0].info(self.key)
        match self.end:
            case "prequant_scaling_factor":
                return 0 if self.dim == 1 else None
            case "per_channel_scale" if self.dim == 1:
                return 1 if self.bits else None
            case _ if self.dim is None or self.dim >= len(stored.shape) or prod(stored.shape) == 1:
                return None
            case _:
                return self.dim

    def _local(self, tensors: Tensors, dtype: str) -> Part:
        """What a rank has of this tensor; experts lie above each other."""
        stored, key = tensors.info(self.key), self.key
        if self.bits and self.end == "weight":  # bytes of the transposed codes
            part = tensors.bytes(key, dtype, (stored.shape[1] * 8 // self.bits, stored.shape[0]))
        elif self.bits and self.dim == 1 and self.end == "per_channel_scale":
            part = tensors.take(key, dtype)  # of the inputs that this rank has
            part = Part(part.ref.then(Unsqueeze(1)), dtype, (*part.shape, 1))
        elif stored.dtype == dtype and len(stored.shape) < 3:
            part = tensors.take(key, dtype)
        else:
            outer = prod(stored.shape[:-1])
            columns = stored.nbytes * 8 // dtype_called(dtype).bits // max(1, outer)
            part = tensors.bytes(key, dtype, (outer, columns))
        begin, end, total = self.rows
        size = part.shape[0] if part.shape else 1
        if size == 1 or total == 1 or self.end == "prequant_scaling_factor":
            return part
        if size % total:
            raise Error(f"{key} is {part.type}; expected a multiple of {total} rows")
        return _rows(part, begin * size // total, end * size // total)

    def _check_equal(self) -> None:
        """An Error where ranks have different scales of something that all of them have."""
        first, *others = (tensors.read(self.key).tobytes() for tensors in self.ranks)
        if any(other != first for other in others):
            raise Error(
                f"{self.key} differs between ranks, but irc dequantizes the joined weight; convert "
                "with tp_size=1, which every mesh of irc can use, or compile the original "
                "checkpoint with --quantize"
            )


def _rows(part: Part, begin: int, end: int) -> Part:
    """Some rows of a tensor."""
    rest = part.shape[1:]
    step = Slice(((begin, end), *(None for _ in rest)))
    return Part(part.ref.then(step), part.dtype, (end - begin, *rest))


def _concatenated(parts: Sequence[Part], dim: int) -> Part:
    """Tensors joined along a dimension, which may have another size in each."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return Part(ConcatRef(tuple(part.ref for part in parts), dim), first.dtype, shape)


class RankFile(Checkpoint):
    """The tensors of one rank by key."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name = f"rank{rank}.safetensors"
        super().__init__(folder)

    def _find(self) -> dict[str, str]:
        return dict.fromkeys(self._header(self.name), self.name)


class RankTensors(Tensors):
    """The tensors of one rank; references name the file rank0, rank1, ..., or `alias`."""

    def __init__(self, folder: Path, rank: int, alias: str = "") -> None:
        super().__init__(RankFile(folder, rank), lambda _: alias or f"rank{rank}")


class Ranks(Checkpoint):
    """The tensors of all ranks by their keys in transformers; those of no model keep their own."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        self.wholes: dict[str, Whole] = {}
        self.paths = {
            f"rank{i}": (folder / f"rank{i}.safetensors").as_posix() for i in range(layout.ranks)
        }
        super().__init__(folder)

    def tensor(self, key: str) -> Tensor:
        """dtype and shape of a joined tensor, which is nowhere."""
        whole = self.wholes[key]
        part = whole.joined(whole.dtype)
        return Tensor(part.dtype, part.shape, 0, dtype_called(part.dtype).nbytes(prod(part.shape)))

    def _find(self) -> dict[str, str]:
        self._check_files()
        tensors: list[Tensors] = [
            RankTensors(self.folder, rank) for rank in range(self.layout.ranks)
        ]
        tp, done = self.layout.tp, 0
        for stage in range(self.layout.pp):
            ranks = tensors[stage * tp : (stage + 1) * tp]
            first = self._first_layer(ranks, stage, done)
            for key in dict.fromkeys(key for rank in ranks for key in rank.checkpoint):
                self._check_ranks(ranks, key)
                self.wholes |= self._named(ranks, key, done - first)
            done += len(_layers(ranks[0]))
        if done != self.layout.layers:
            raise Error(
                f"{self.folder} has {done} layers in {self.layout.pp} pipeline stages, but "
                f"num_hidden_layers is {self.layout.layers}; some converters leave out the last "
                "layers where pp_size does not divide them, so convert again with another pp_size"
            )
        return dict.fromkeys(self.wholes, "")

    def _named(self, ranks: list[Tensors], key: str, shift: int) -> dict[str, Whole]:
        """The tensors in what the ranks have under a key; layers are numbered from `shift` on."""
        prefix, rest, match = "", key, _LAYER.match(key)
        if match is not None:
            prefix, rest = f"model.layers.{int(match[1]) + shift}.", match[2]
        module, _, end = rest.rpartition(".")
        owner = key.removesuffix(f".{end}")
        if module not in PLACES:
            return {key: Whole(ranks, owner, end)}
        if end in _SCALES and self._is_float(ranks[0], owner):
            return {}
        names, dim = PLACES[module]
        dim = self.layout.table_dim if module.endswith("vocab_embedding") else dim
        whole = Whole(ranks, owner, end, dim, most=self.layout.rows if module in _PADDED else None)
        if self.layout.bits and f"{owner}.per_channel_scale" in ranks[0]:
            whole = replace(whole, bits=self.layout.bits)
        if len(ranks[0].checkpoint.tensor(key).shape) == 3:
            return {f"{prefix}{name}": whole for name, whole in self._experts(whole)}
        sizes = self.layout.qkv if module == "attention.qkv" else (1,) * len(names)
        wholes: dict[str, Whole] = {}
        for i, name in enumerate(names):
            own = ranks[:: self.layout.step] if i and module == "attention.qkv" else ranks
            rows = (sum(sizes[:i]), sum(sizes[: i + 1]), sum(sizes))
            wholes[f"{prefix}{name}.{_SCALES.get(end, end)}"] = replace(whole, ranks=own, rows=rows)
        return wholes

    def _experts(self, stack: Whole) -> Iterator[tuple[str, Whole]]:
        """The experts of all ranks: `fc` has w3 over w1 of each, `proj` has w2."""
        if stack.bits:
            raise Error(
                f"{stack.key} has weight-only codes of experts, which irc does not read; convert "
                "without quantization, and give irc --quantize"
            )
        groups = self.layout.moe_ep
        count = stack.ranks[0].checkpoint.tensor(stack.key).shape[0]
        names = ("w2",) if stack.owner.endswith("proj") else ("w3", "w1")
        for i in range(count * len(names)):
            rows = (i, i + 1, count * len(names))
            for group in range(groups):
                expert = count * group + i // len(names)
                own = replace(stack, ranks=stack.ranks[group::groups], rows=rows)
                yield f"{_EXPERTS}.{expert}.{names[i % len(names)]}.weight", own

    def _is_float(self, tensors: Tensors, owner: str) -> bool:
        """Whether a layer was not quantized, whatever scales it has; AWQ has codes in halves."""
        key = f"{owner}.weight"
        return not self.layout.packed and key in tensors and tensors.info(key).dtype in FLOATS

    def _check_ranks(self, ranks: Sequence[Tensors], key: str) -> None:
        lacking = [i for i, tensors in enumerate(ranks) if key not in tensors]
        if lacking:
            raise Error(
                f"{self.folder}: {key} is not on all ranks of its stage, but missing on number "
                f"{', '.join(map(str, lacking))} of them; copy all files of one conversion"
            )

    def _check_files(self) -> None:
        missing = [f"{name}.safetensors" for name, p in self.paths.items() if not Path(p).is_file()]
        count = len(self.paths)
        layout = f"config.json has tp_size={self.layout.tp} and pp_size={self.layout.pp}"
        if missing:
            raise Error(
                f"{self.folder} lacks {', '.join(missing)}: {layout}, so there are {count} rank "
                "files; copy all of them"
            )
        if (self.folder / f"rank{count}.safetensors").is_file():
            raise Error(
                f"{self.folder} has rank{count}.safetensors, but {layout}, which are {count} "
                "ranks; give the config.json of this conversion"
            )

    def _first_layer(self, ranks: Sequence[Tensors], stage: int, done: int) -> int:
        """The number of a stage's first layer in its files; they count per stage or over all."""
        ids = _layers(ranks[0])
        first = ids[0] if ids else 0
        if ids != list(range(first, first + len(ids))) or first not in (0, done):
            raise Error(
                f"{self.folder}: the layers of pipeline stage {stage} are {ids}; expected "
                f"0, 1, ... or {done}, {done + 1}, ..., without gaps"
            )
        return first


class JoinedTensors(Tensors):
    """The joined tensors; references name the files of the ranks."""

    checkpoint: Ranks

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, str)

    def _part(self, key: str, tensor: Tensor) -> Part:
        return self.checkpoint.wholes[key].joined(tensor.dtype)

    def view(self, key: str, dtype: str, shape: Sizes) -> Part:
        """The bytes of a tensor as another type, also with dimensions of size 1 behind."""
        self.used.add(key)
        part = self.checkpoint.wholes[key].joined(dtype)
        while len(part.shape) < len(shape):
            ref = part.ref.then(Unsqueeze(len(part.shape)))
            part = Part(ref, dtype, (*part.shape, 1))
        if part.shape != shape:
            raise Error(f"{key} is {part.type}; expected {TensorType(dtype, shape)}")
        return part

    def number(self, key: str) -> float:
        """The largest of the numbers of the ranks."""
        self.used.add(key)
        whole = self.checkpoint.wholes[key]
        return max(tensors.number(whole.key) for tensors in whole.ranks)

    def read(self, key: str) -> Any:
        """The values of a small tensor on all ranks."""
        self.used.add(key)
        whole = self.checkpoint.wholes[key]
        return np.concatenate([tensors.read(whole.key).ravel() for tensors in whole.ranks])


class RankShards(Tensors):
    """A checkpoint of transformers by the names that the file of a rank has: the rank's shards.

    `layers` are those of the rank's pipeline stage. A shard is over the mesh axis tp.
    """

    def __init__(
        self, checkpoint: Checkpoint, file: Callable[[str], str], layout: Layout, layers: list[int]
    ) -> None:
        super().__init__(checkpoint, file)
        self._layout, self._layers = layout, layers

    def __contains__(self, key: str) -> bool:
        return self._place(key)[1] in PLACES

    def take(self, key: str, *dtypes: str) -> Part:
        """This rank's shard of a tensor; an Error where it has none of the dtypes."""
        scope, module, end = self._place(key)
        names, dim = PLACES[module]
        if module == "lm_head" and "lm_head.weight" not in self.checkpoint:
            names = ("model.embed_tokens",)
        if module == "transformer.vocab_embedding":
            dim = self._layout.table_dim
        dim = None if dim == 1 and end == "bias" else dim
        wholes = [super(RankShards, self).take(f"{scope}{name}.{end}", *dtypes) for name in names]
        parts = zip(names, wholes, strict=True)
        return _concatenated([self._shard(name, whole, dim) for name, whole in parts], 0)

    def _place(self, key: str) -> tuple[str, str, str]:
        """(the prefix of the layer in transformers, the module, weight or bias)."""
        match = _LAYER.match(key)
        module, _, end = (key if match is None else match[2]).rpartition(".")
        scope = "" if match is None else f"model.layers.{self._layers[int(match[1])]}."
        return scope, module, end

    def _shard(self, name: str, whole: Part, dim: int | None) -> Part:
        """This rank's part; each of fewer key heads than ranks is on several."""
        tp, step = self._layout.tp, self._layout.step
        if tp == 1 or dim is None:
            return whole
        if name.endswith(("k_proj", "v_proj")) and step > 1:
            heads, size = tp // step, whole.shape[0] * step // tp
            parts = [_rows(whole, i * size, (i + 1) * size) for i in range(heads)]
            whole = _concatenated([part for part in parts for _ in range(step)], 0)
        shape = tuple(-(-n // tp) if i == dim else n for i, n in enumerate(whole.shape))
        return Part(whole.ref.then(Shard(dim, ("tp",))), whole.dtype, shape)


class WeightOnly(Method):
    """Codes of 8 or 4 bits, with a scale per row, or per row and rank of a row-parallel layer."""

    marks = ("weight_scale",)

    def __init__(self, config: ConfigReader | None = None) -> None: ...

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        key = f"{name}.weight"
        codes = tensors.view(key, tensors.info(key).dtype, shape)
        return Layer(codes, take_scales(tensors, f"{name}.weight_scale", shape))


def _layers(tensors: Tensors) -> list[int]:
    """The numbers of the layers in a rank's file."""
    keys = tensors.checkpoint
    return sorted({int(match[1]) for key in keys if (match := _LAYER.match(key))})
