"""`bind`: gives the unbound parameters of a module their tensors in a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ...core import Module, Weight
from ...dims import Shape
from ...errors import Error, did_you_mean
from ...types import TensorType
from ...weights import Cast, ConcatRef, FileRef, Ref, UnboundRef
from .files import Checkpoint

# Tensors that old checkpoints hold and no model reads: tables that are computed anew.
BUFFERS = (
    "*.rotary_emb.inv_freq",
    "*.rotary_emb.cos_cached",
    "*.rotary_emb.sin_cached",
    "*.embeddings.position_ids",
    "*.attn.masked_bias",
    "*.attention.masked_bias",
)
_CONVERTIBLE = ("f64", "f32", "f16", "bf16")
_MOST_LINES = 20


@dataclass
class _Findings:
    """What does not fit, a line each, by kind."""

    missing: list[str] = field(default_factory=list[str])
    extra: list[str] = field(default_factory=list[str])
    misshapen: list[str] = field(default_factory=list[str])


def bind(
    module: Module,
    folder: str | os.PathLike[str],
    *,
    other_names: Mapping[str, Sequence[str]] | None = None,
    ignore: Sequence[str] = (),
) -> Module:
    """Replace every `unbound(key)` by the tensor `key` of the folder, and return the module.

    A tensor stored in another float dtype than the weight's is cast when it is read. `other_names`
    gives further names that a key may have in the files. `ignore` holds patterns such as
    "vision_tower.*" for tensors that the model leaves out on purpose. An Error lists everything
    that does not fit, all at once, and leaves the module as it was.
    """
    checkpoint = Checkpoint(folder)
    findings = _Findings()
    keys = _chosen_keys(module, checkpoint, other_names or {}, findings)
    spare = {name for names in (other_names or {}).values() for name in names}
    used = set(keys.values()) | spare
    wanted = [name for name in _parameters(module) if name not in keys]
    for key in checkpoint:
        if key not in used and not any(fnmatchcase(key, p) for p in (*BUFFERS, *ignore)):
            findings.extra.append(f"{key}{did_you_mean(key, wanted)}")
    bound = _Binder(module, checkpoint, keys)
    for weight in module.weights.values():
        if any(True for _ in _unbound(weight.ref)):
            findings.misshapen += bound.misfits(weight)
    _report(findings, checkpoint, module)
    for weight in module.weights.values():
        weight.ref = bound.bound(weight.ref, weight.type.dtype)
    return module


def has_unbound(module: Module) -> bool:
    """Whether any weight still lacks its values."""
    return any(True for _ in _parameters(module))


def _parameters(module: Module) -> Iterator[str]:
    for weight in module.weights.values():
        for ref in _unbound(weight.ref):
            yield ref.key


def _unbound(ref: Ref) -> Iterator[UnboundRef]:
    return (source for source in ref.sources() if isinstance(source, UnboundRef))


def _chosen_keys(
    module: Module,
    checkpoint: Checkpoint,
    other_names: Mapping[str, Sequence[str]],
    findings: _Findings,
) -> dict[str, str]:
    """Parameter -> key in the files, for all that are there."""
    keys: dict[str, str] = {}
    for name in dict.fromkeys(_parameters(module)):
        known = [key for key in (name, *other_names.get(name, ())) if key in checkpoint]
        if known:
            keys[name] = known[0]
        else:
            findings.missing.append(f"{name}{did_you_mean(name, checkpoint)}")
    return keys


class _Binder:
    """References to the files of one checkpoint; files are declared as they are needed."""

    def __init__(self, module: Module, checkpoint: Checkpoint, keys: Mapping[str, str]) -> None:
        self._module, self._checkpoint, self._keys = module, checkpoint, keys
        self._names: dict[str, str] = {}

    def misfits(self, weight: Weight) -> list[str]:
        """What is wrong with the tensors of one weight."""
        lines: list[str] = []
        for ref in _unbound(weight.ref):
            if ref.key not in self._keys:
                continue
            tensor = self._checkpoint.tensor(self._keys[ref.key])
            held = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
            wanted: Shape | None = ref.shape
            if wanted is None and ref is weight.ref and not ref.steps:
                wanted = weight.type.shape
            if wanted is not None and wanted != tensor.shape:
                takes = TensorType(weight.type.dtype, wanted)
                lines.append(f"{ref.key} is {held}, but the model takes {takes}")
            elif not _fits(tensor.dtype, weight.type.dtype):
                lines.append(f"{ref.key} is {held}, which does not convert to {weight.type.dtype}")
        return lines

    def bound(self, ref: Ref, dtype: str) -> Ref:
        """`ref` with files instead of unbound sources, cast right after the source."""
        if isinstance(ref, ConcatRef):
            return replace(ref, parts=tuple(self.bound(part, dtype) for part in ref.parts))
        if not isinstance(ref, UnboundRef):
            return ref
        key = self._keys[ref.key]
        stored = self._checkpoint.tensor(key).dtype
        cast = () if stored == dtype else (Cast(dtype),)
        return FileRef(self._file(key), key, steps=(*cast, *ref.steps))

    def _file(self, key: str) -> str:
        """The short name of the file that holds `key`: `ckpt`, `ckpt_1`, `ckpt_2`, ..."""
        file = self._checkpoint.file(key)
        if file not in self._names:
            path = (self._checkpoint.folder / file).as_posix()
            self._names[file] = _declare(self._module, path)
        return self._names[file]


def _declare(module: Module, path: str) -> str:
    for name, known in module.files.items():
        if known == path:
            return name
    name, count = "ckpt", 0
    while name in module.files:
        count += 1
        name = f"ckpt_{count}"
    module.files[name] = path
    return name


def _fits(stored: str, wanted: str) -> bool:
    return stored == wanted or (stored in _CONVERTIBLE and wanted in _CONVERTIBLE)


def _report(findings: _Findings, checkpoint: Checkpoint, module: Module) -> None:
    """One Error about everything, if there is anything."""
    parts = [
        (f"the model @{module.name} needs these tensors, which are not there", findings.missing),
        ("these tensors are there, but the model has no place for them", findings.extra),
        ("these tensors do not fit the model", findings.misshapen),
    ]
    if not any(lines for _, lines in parts):
        return
    error = Error(f"the checkpoint {checkpoint.folder} does not fit the model @{module.name}")
    for title, lines in parts:
        if lines:
            error.add_note(f"{title}:")
            more = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
            for line in [*lines[:_MOST_LINES], *more]:
                error.add_note(f"  {line}")
    if findings.extra:
        error.add_note('tensors left out on purpose are named with ignore=[...], as in "lm_head.*"')
    raise error
