"""`Adapter`: a LoRA adapter in PEFT's format, merged into the tensors of a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from ...errors import Error
from ...ir.core import Weight
from ...json_files import read_object
from ...weights import Cast, FileRef, LowRankSumRef, Ref, Transpose
from ...weights.safetensors import read_header
from ..models.config_reader import ConfigReader
from .files import Checkpoint, hub_hint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = (
    "; or merge it with peft, PeftModel.from_pretrained(model, DIR).merge_and_unload()"
    ".save_pretrained(FOLDER), and compile FOLDER"
)
# Keys that change no weights: origin, training, and which modules the file has tensors for.
_HARMLESS = """
    arrow_config auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules inference_mode init_lora_weights layers_pattern layers_to_transform
    loftq_config lora_dropout megatron_config megatron_core modules_to_save peft_type peft_version
    qalora_group_size revision runtime_config task_type
"""
# Initializations that leave the weights of the checkpoint as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.lora_(embedding_)?([AB])(?:\.weight)?)?")


@dataclass(frozen=True)
class _Settings:
    """What adapter_config.json says; `ranks` and `alphas` are by patterns of modules."""

    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    rank_stabilized: bool
    transposed: bool
    targets: str | Sequence[str]

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A in a module (Hu et al., 2021; rsLoRA: Kalajdzievski, 2023)."""
        wanted = _by_pattern(self.ranks, module, self.rank)
        if rank != wanted:
            raise Error(f"the adapter has rank {rank} in {module}, but {CONFIG} sets {wanted}")
        scale = float(_by_pattern(self.alphas, module, self.alpha))
        scale /= sqrt(rank) if self.rank_stabilized else rank
        if not isfinite(scale):
            raise Error(f"{CONFIG} scales {module} by {scale}; expected a finite number")
        return scale

    def is_target(self, module: str) -> bool:
        """Whether target_modules names a module."""
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or _matches(self.targets, module)
        return any(module == name or module.endswith(f".{name}") for name in self.targets)


def check_adapter(folder: str | os.PathLike[str], ignore: Sequence[str] = ()) -> _Settings:
    """The settings of an adapter folder; an Error about those that irc cannot merge."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        hint = hub_hint(folder)
        raise Error(f"{folder} is not an adapter of PEFT: it has no {CONFIG}{hint}")
    values = read_object(path)
    config = ConfigReader(values, str(path))
    targets: Any = config.word if isinstance(values.get("target_modules"), str) else config.words
    if config.word("peft_type") != "LORA":
        raise config.error("peft_type", f"irc merges LoRA only{_MERGE}")
    if values.get("init_lora_weights") not in _PLAIN_STARTS:
        raise config.error("init_lora_weights", f"it changes weights of the model too{_MERGE}")
    if config.flag("use_dora"):
        raise config.error("use_dora", f"irc merges plain LoRA only{_MERGE}")
    bias = config.word("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise config.error("bias", "expected none, all or lora_only")
    settings = _Settings(
        rank=config.integer("r", 8),
        alpha=config.number("lora_alpha", 8.0),
        ranks=config.inner("rank_pattern"),
        alphas=config.inner("alpha_pattern"),
        rank_stabilized=config.flag("use_rslora"),
        transposed=config.flag("fan_in_fan_out"),
        targets=targets("target_modules"),
    )
    for pattern, value in (*settings.ranks.items(), *settings.alphas.items()):
        if not isinstance(value, (int, float)):
            raise Error(f"{path} has {value!r} for {pattern}; expected a number")
    config.finish("an adapter", {*_HARMLESS.split(), *ignore})
    return settings


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits a module, or the end of its name."""
    chosen = (value for key, value in patterns.items() if _matches(rf"(.*\.)?({key})", module))
    return next(chosen, default)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise Error(f"{CONFIG}: {pattern!r} is no regular expression: {error}") from None


@dataclass
class _Factors:
    """The keys of the factors B [out, r] and A [r, in] of a module's change."""

    module: str
    is_table: bool  # of an embedding, whose tensor is [in, out]
    B: str = ""
    A: str = ""


class Adapter:
    """The changes that an adapter folder makes to the tensors of a checkpoint, by their keys.

    `file` names a file in the module. Patterns in `ignore` are of tensors that no model uses.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        base: Checkpoint,
        file: Callable[[Path, str], str],
        ignore: Sequence[str] = (),
    ) -> None:
        self._base, self._ignore = base, ignore
        self._settings = check_adapter(folder, ignore)
        self.path = Path(folder) / WEIGHTS
        if not self.path.is_file():
            hint = "peft's model.save_pretrained(DIR) writes it"
            raise Error(f"{folder} has no {WEIGHTS}, which irc reads; {hint}")
        self._header, self._file = read_header(self.path), file(self.path, "adapter")
        self._replaced: dict[str, str] = {}  # key of the checkpoint -> own key
        self._factors: dict[str, _Factors] = {}
        for key in self._header:
            self._add(key)
        for key, factors in self._factors.items():
            self._check(key, factors)

    def __contains__(self, key: str) -> bool:
        return key in self._factors or key in self._replaced

    def _add(self, key: str) -> None:
        """Note what a tensor of the adapter changes."""
        match = _NAME.fullmatch(key)
        name, table, side = match.groups() if match else (key, None, None)
        if side is not None:
            if not self._settings.is_target(name):
                raise Error(f"{self.path} has {key}, but {CONFIG} does not target {name}")
            factors = _Factors(name, table is not None)
            setattr(self._factors.setdefault(self._key(f"{name}.weight"), factors), side, key)
        elif ".lora_" in key:
            raise Error(f"{self.path} has {key}, which irc cannot merge{_MERGE}")
        else:
            self._replaced[self._key(name.replace(".base_layer.", "."))] = key

    def _key(self, name: str) -> str:
        """The tensor of the checkpoint, which may have another prefix than the model in PEFT."""
        heads = dict.fromkeys(key.partition(".")[0] for key in self._base)
        names = (name, name.partition(".")[2], *(f"{head}.{name}" for head in heads))
        keys = [key for key in names if key in self._base]
        if not keys:
            raise Error(
                f"{self.path} changes {name}, which the checkpoint {self._base.folder} lacks: it "
                f"may be joined with others there, or tied. Give the folder of its model{_MERGE}"
            )
        return keys[0]

    def _check(self, key: str, factors: _Factors) -> None:
        """An Error unless a module has both factors, and its tensor their shape."""
        if not (factors.A and factors.B):
            raise Error(f"{self.path} has one factor of {factors.module} only; expected A and B")
        shape, sides = self._shape(key), [self._header[factors.B], self._header[factors.A]]
        wanted = shape[::-1] if self._is_transposed(factors) else shape
        (*out, rank), (*also, columns) = sides[0].shape, sides[1].shape
        if len(shape) != 2 or (*out, columns) != wanted or also != [rank]:
            held = " @ ".join(str([*side.shape]) for side in sides)
            raise Error(f"{self.path} adds {held} to {key}, which is {[*shape]}{_MERGE}")

    def _shape(self, key: str) -> tuple[int, ...]:
        own = self._replaced.get(key)
        return (self._base.tensor(key) if own is None else self._header[own]).shape

    def _is_transposed(self, factors: _Factors) -> bool:
        return factors.is_table or self._settings.transposed

    def merged(self, key: str, ref: Ref, dtype: str) -> tuple[Ref, str]:
        """The reference and dtype of the tensor `key`, which are `ref` and `dtype` without me."""
        if key in self._replaced:
            own = self._replaced[key]
            ref, dtype = FileRef(self._file, own), self._header[own].dtype
        if key not in self._factors:
            return ref, dtype
        factors = self._factors[key]
        left, right = FileRef(self._file, factors.B), FileRef(self._file, factors.A)
        scale = self._settings.scale(factors.module, self._header[factors.A].shape[0])
        sides: tuple[Ref, Ref] = left, right
        if self._is_transposed(factors):
            sides = right.then(Transpose((1, 0))), left.then(Transpose((1, 0)))
        return LowRankSumRef(ref.then(Cast("f32")), *sides, scale), "f32"

    def check_used(self, weights: Iterable[tuple[Weight, Iterable[str]]]) -> None:
        """An Error about changes of tensors that no weight has, or a tied one.

        `weights` are those of the model, with the keys of their tensors.
        """
        unused = {*self._factors, *self._replaced}
        for weight, keys in weights:
            changed = [key for key in keys if key in self]
            unused.difference_update(changed)
            if changed and len({type(user) for user in weight.users}) > 1:
                raise Error(
                    f"{self.path} changes {changed[0]}, which is both embedding and head of the "
                    f"model (tie_word_embeddings): irc cannot tell which one{_MERGE}"
                )
        names = [k for k in sorted(unused) if not any(fnmatchcase(k, p) for p in self._ignore)]
        if names:
            raise Error(
                f"{self.path} changes {', '.join(names[:5])}, which the model does not use; leave "
                "such tensors out with --set ignore=PATTERN,..."
            )
