"""`bind`: replaces the unbound weights of a module by tensors of a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ...errors import Error, did_you_mean
from ...ir.core import Module, Weight
from ...ir.dims import Shape
from ...ir.types import TensorType
from ...weights import Cast, Ref, UnboundRef
from . import quantized
from .adapters import Adapter
from .files import Checkpoint

# Tensors of old checkpoints that no model reads: tables that are computed anew.
BUFFERS = (
    "*.rotary_emb.inv_freq",
    "*.rotary_emb.cos_cached",
    "*.rotary_emb.sin_cached",
    "*embeddings.position_ids",
    "*.attn.masked_bias",
    "*.attention.masked_bias",
    "*.attn.bias",  # the causal mask
    "*.attention.bias",
)
_CONVERTIBLE = ("f64", "f32", "f16", "bf16")
_MOST_LINES = 20


def bind(
    module: Module,
    folder: str | os.PathLike[str],
    *,
    alternatives: Mapping[str, Ref] | None = None,
    ignore: Sequence[str] = (),
    adapter: str | os.PathLike[str] | None = None,
) -> Module:
    """Replace every `unbound(key)` by the tensor `key` of the folder, and return the module.

    A tensor stored in another float dtype than the weight's is cast when it is read. A weight that
    lacks tensors takes its reference in `alternatives`, if the folder has those tensors; a folder
    with both must have the same values there. A weight that the folder has quantized becomes a
    `dequantize` operation. `ignore` holds patterns, such as "vision_tower.*", of tensors that the
    model does not use. The LoRA `adapter` of a folder is merged. An Error lists everything that
    does not fit and leaves the module as it was.
    """
    checkpoint = Checkpoint(folder)
    files = _Files(module, checkpoint)
    stored = quantized.Tensors(checkpoint, files.name)
    method = quantized.read_method(folder)
    changes = None if adapter is None else Adapter(adapter, checkpoint, files.named, ignore)
    return bind_tensors(module, stored, files.paths, method, alternatives or {}, ignore, changes)


def bind_tensors(
    module: Module,
    stored: quantized.Tensors,
    files: Mapping[str, str],
    method: quantized.Method | None,
    alternatives: Mapping[str, Ref],
    ignore: Sequence[str],
    adapter: Adapter | None = None,
) -> Module:
    """`bind` to tensors whose references name `files`, quantized by `method`."""
    checkpoint = stored.checkpoint
    refs = {name: weight.ref for name, weight in module.weights.items()}
    for name in refs.keys() & alternatives.keys():
        if not has_all(checkpoint, refs[name]) and has_all(checkpoint, alternatives[name]):
            refs[name] = alternatives[name]
        elif differ(checkpoint, refs[name], alternatives[name]):
            raise Error(
                f"the checkpoint {checkpoint.folder} has {tensors(refs[name])} and "
                f"{tensors(alternatives[name])} with different values, but in the model "
                f"@{module.name} both are the weight {name}"
            )
    layers = quantized.find_layers(module, refs, stored, method)
    plain = {name: ref for name, ref in refs.items() if name not in layers}
    allowed = {source.key for ref in alternatives.values() for source in _unbound(ref)}
    ignore = (*BUFFERS, *quantized.cache_keys(checkpoint), *ignore)
    _check(module, plain, checkpoint, allowed | stored.used, ignore)
    if adapter is not None:
        adapter.check_used((module.weights[n], _keys(ref)) for n, ref in refs.items())
        for key in (key for name in layers for key in _keys(refs[name]) if key in adapter):
            raise Error(
                f"{adapter.path} changes {key}, which the checkpoint has quantized; compile the "
                "checkpoint with float weights, with --adapter and --quantize"
            )
    for name, ref in plain.items():
        weight = module.weights[name]
        weight.ref = _bound(stored, ref, weight.type.dtype, adapter)
    module.files.update(files)
    quantized.insert(module, layers)
    return module


def prefix_tensors(
    module: Module, alternatives: Mapping[str, Ref], prefixes: Sequence[str], checkpoint: Checkpoint
) -> Mapping[str, Ref]:
    """Let unbound weights name tensors by the one of `prefixes` that a checkpoint has.

    A prefix takes the place of the first one. What encloses it in the checkpoint is put in front of
    other tensors too, where the checkpoint has them so. Norms of checkpoints made from TensorFlow
    have gamma and beta. Returns `alternatives` with these names.
    """
    first = prefixes[0]
    keys = [s.key for weight in module.weights.values() for s in _unbound(weight.ref)]
    sample = next((key.removeprefix(first) for key in keys if key.startswith(first)), "")
    prefix = next((prefix for prefix in prefixes if prefix + sample in checkpoint), first)

    def renamed(key: str) -> str:
        outer = prefix.removesuffix(first) + key
        if key.startswith(first):
            key = prefix + key.removeprefix(first)
        elif outer in checkpoint:
            key = outer
        old = key.replace("LayerNorm.weight", "LayerNorm.gamma")
        old = old.replace("LayerNorm.bias", "LayerNorm.beta")
        return old if old in checkpoint else key

    for weight in module.weights.values():
        weight.ref = _renamed(weight.ref, renamed)
    return {name: _renamed(ref, renamed) for name, ref in alternatives.items()}


def _renamed(ref: Ref, rename: Callable[[str], str]) -> Ref:
    if isinstance(ref, UnboundRef):
        return replace(ref, key=rename(ref.key))
    return ref.with_inputs([_renamed(part, rename) for part in ref.inputs])


def has_unbound(module: Module) -> bool:
    """Whether any weight still lacks its values."""
    return any(True for weight in module.weights.values() for _ in _unbound(weight.ref))


def _unbound(ref: Ref) -> Iterator[UnboundRef]:
    return (source for source in ref.sources() if isinstance(source, UnboundRef))


def has_all(checkpoint: Checkpoint, ref: Ref) -> bool:
    """Whether the folder has every tensor of a reference."""
    return all(source.key in checkpoint for source in _unbound(ref))


def _keys(ref: Ref) -> list[str]:
    """The keys of a reference's tensors."""
    return [source.key for source in _unbound(ref)]


def tensors(ref: Ref) -> str:
    """The keys of a reference's tensors, for a message."""
    return ", ".join(_keys(ref))


def differ(checkpoint: Checkpoint, one: Ref, other: Ref) -> bool:
    """Whether the folder has the tensors of both references, and they are not known to be equal."""
    if not (has_all(checkpoint, one) and has_all(checkpoint, other)):
        return False
    if not (isinstance(one, UnboundRef) and isinstance(other, UnboundRef)):
        return True
    return one.steps != other.steps or not checkpoint.has_equal(one.key, other.key)


def _check(
    module: Module,
    refs: Mapping[str, Ref],
    checkpoint: Checkpoint,
    allowed: set[str],
    ignore: Sequence[str],
) -> None:
    """Raise one Error about all tensors that are missing, unused, or of a wrong shape or dtype."""
    keys = dict.fromkeys(source.key for ref in refs.values() for source in _unbound(ref))
    absent = [key for key in keys if key not in checkpoint]
    unused = [
        key
        for key in checkpoint
        if key not in keys and key not in allowed and not any(fnmatchcase(key, p) for p in ignore)
    ]
    misfits = [
        line
        for name, ref in refs.items()
        for source in _unbound(ref)
        if source.key in checkpoint
        for line in _misfit(module.weights[name], ref, source, checkpoint)
    ]
    check_fits(
        f"the checkpoint {checkpoint.folder}",
        module,
        suggested(absent, checkpoint),
        suggested(unused, absent),
        misfits,
    )


def check_fits(
    checkpoint: str, module: Module, absent: list[str], unused: list[str], misfits: list[str]
) -> None:
    """Raise one Error with these lines about tensors that do not fit, unless there are none."""
    groups = {
        f"the model @{module.name} needs these tensors, which are missing": absent,
        "these tensors are in the checkpoint, but the model does not use them": unused,
        "these tensors do not fit the model": misfits,
    }
    if not any(groups.values()):
        return
    error = Error(f"{checkpoint} does not fit the model @{module.name}")
    for title, lines in groups.items():
        if lines:
            error.add_note(f"{title}:")
            more = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
            for line in [*lines[:_MOST_LINES], *more]:
                error.add_note(f"  {line}")
    if unused:
        error.add_note(
            "leave tensors out with --set ignore=lm_head.* where the folder is compiled, in Python "
            'with bind(module, folder, ignore=["lm_head.*"])'
        )
    raise error


def suggested(keys: list[str], names: Iterable[str]) -> list[str]:
    """The keys; those that are shown have the most similar known one, which takes long to find."""
    shown = [f"{key}{did_you_mean(key, names)}" for key in keys[:_MOST_LINES]]
    return [*shown, *keys[_MOST_LINES:]]


def _misfit(weight: Weight, ref: Ref, source: UnboundRef, checkpoint: Checkpoint) -> Iterator[str]:
    """A line where the tensor of `source` has another shape, or a dtype that does not convert."""
    tensor, dtype = checkpoint.tensor(source.key), weight.type.dtype
    described = f"{source.key} is {tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    wanted: Shape | None = source.shape
    if wanted is None and source is ref and not source.steps:
        wanted = weight.type.shape
    if wanted is not None and wanted != tensor.shape:
        yield f"{described}, but the model takes {TensorType(dtype, wanted)}"
    elif tensor.dtype != dtype and not {tensor.dtype, dtype} <= set(_CONVERTIBLE):
        yield f"{described}, which does not convert to {dtype}"


def _bound(stored: quantized.Tensors, ref: Ref, dtype: str, adapter: Adapter | None) -> Ref:
    """`ref` with stored tensors instead of unbound sources, cast right after the source."""
    if ref.inputs:
        return ref.with_inputs([_bound(stored, part, dtype, adapter) for part in ref.inputs])
    if not isinstance(ref, UnboundRef):
        return ref
    kind = stored.info(ref.key).dtype
    bound = stored.take(ref.key, kind).ref
    if adapter is not None:
        bound, kind = adapter.merged(ref.key, bound, kind)
    for step in (*(() if kind == dtype else (Cast(dtype),)), *ref.steps):
        bound = bound.then(step)
    return bound


class _Files:
    """The names of the files of a checkpoint; `paths` are the files that a module declares."""

    def __init__(self, module: Module, checkpoint: Checkpoint) -> None:
        self.paths, self._checkpoint = dict(module.files), checkpoint
        self._names = {path: name for name, path in module.files.items()}

    def name(self, key: str) -> str:
        """The name of the file that holds `key` in the module: `ckpt`, `ckpt_1`, `ckpt_2`, ..."""
        return self.named(self._checkpoint.folder / self._checkpoint.file(key), "ckpt")

    def named(self, file: Path, stem: str) -> str:
        """The name of a file in the module, which begins with `stem` if it is new."""
        path = file.as_posix()
        if path not in self._names:
            name, count = stem, 0
            while name in self.paths:
                count += 1
                name = f"{stem}_{count}"
            self.paths[name] = path
            self._names[path] = name
        return self._names[path]
