"""What can be compiled: a script, a checkpoint, text, an ONNX file, an artifact, a module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..artifact import MODULE, check, is_artifact, read_manifest
from ..checksums import sampled
from ..core import Module
from ..dims import Dim, Dims, checked_ranges
from ..errors import Error
from ..text import parse_module

PathLike: TypeAlias = str | os.PathLike[str]
DTYPES = ("f32", "f16", "bf16")
_CACHES = "cache_update"  # the operation that writes them


@dataclass
class Source:
    """A module before any pass, with what its checkpoint says beside the weights.

    `folder` is where tokenizer files are, `ends` the token ids that end a text.
    """

    module: Module
    folder: Path | None = None
    ends: list[int] = field(default_factory=list[int])


def find_source(
    src: PathLike | Module,
    checkpoint: PathLike | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    random_weights: int | None = None,
    bound: bool = True,
) -> Source:
    """The module that `src` describes, its weights bound and its files by absolute paths.

    `settings` are the keyword arguments of a script's factory; of a checkpoint folder there is
    one, `ignore`: keys of its config.json that do not matter, separated by commas. Unless weights
    are to be `bound`, a checkpoint folder needs no more than its config.json, and the files of an
    artifact are not compared with what was compiled.
    """
    _check_kind(src)
    if checkpoint is not None and random_weights is not None:
        raise Error("give --checkpoint or --random-weights, not both")
    if dtype is not None and dtype not in DTYPES:
        raise Error(f"no compute type called {dtype!r}; there are {', '.join(DTYPES)}")
    folder = None if checkpoint is None else Path(checkpoint)
    given = settings or {}
    if isinstance(src, Module):
        _no_effect("a module", dtype, given)
        source = Source(src, folder)
    elif is_script(os.fspath(src)):
        source = _script(os.fspath(src), folder, dtype, given)
    elif Path(src).is_dir():
        unbound = random_weights is not None or not bound
        source = _folder(Path(src), folder, dtype, given, unbound)
    elif not Path(src).exists():
        raise _nothing(Path(src))
    elif is_onnx(Path(src)):
        _no_effect("an ONNX file", dtype, given)
        source = _onnx(Path(src), folder)
    else:
        _no_effect("a module's text", dtype, given)
        source = _text(Path(src), folder)
    if bound and not isinstance(src, Module):
        _check_unchanged(Path(src), folder)
    _finish(source, folder, dims or {}, random_weights)
    return source


def _check_kind(src: object) -> None:
    if not isinstance(src, (Module, str, os.PathLike)):
        raise Error(
            f"the source is a {type(src).__name__}; give a path or a module of irc (an ONNX model "
            "in memory becomes a file with onnx.save)"
        )


def read_module(path: Path) -> Module:
    """The module in a text file, in an ONNX file, or in an artifact folder."""
    if is_onnx(path):
        return _imported(path)
    if path.is_dir():
        read_manifest(path)
        path = path / MODULE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Error(f"{path} is no text in UTF-8 (byte {error.start} is not)") from None
    return parse_module(text, str(path))


def is_script(src: str) -> bool:
    """Whether a source is meant as `script.py[:factory]`."""
    from ..frontends.script import split_name

    return split_name(src)[0].suffix == ".py"


def _script(
    src: str, checkpoint: Path | None, dtype: str | None, settings: Mapping[str, Any]
) -> Source:
    from ..frontends.script import load_script

    debug = os.environ.get("IRC_DEBUG", "") not in ("", "0")
    place = None if checkpoint is None else str(checkpoint)
    return Source(load_script(src, settings, place, dtype, debug), checkpoint)


def _folder(
    path: Path,
    checkpoint: Path | None,
    dtype: str | None,
    settings: Mapping[str, Any],
    unbound: bool,
) -> Source:
    if is_artifact(path):
        _no_effect("an artifact", dtype, settings)
        return _text(path / MODULE, checkpoint)
    if checkpoint is not None:
        raise Error(f"{path} is a checkpoint itself, so --checkpoint {checkpoint} has no place")
    from ..frontends import huggingface

    for name in settings:
        if name != "ignore":
            raise Error(f"a checkpoint folder has no setting {name!r}; it takes ignore=key,key")
    ignored = [key.strip() for key in str(settings.get("ignore", "")).split(",") if key.strip()]
    if not unbound:
        return Source(huggingface.load(path, dtype, ignore=ignored), path)
    config = huggingface.read_config(path)
    model = huggingface.model_of(config, ignored)
    return Source(model.trace(dtype or huggingface.checkpoint_dtype(config)), path)


def is_onnx(path: Path) -> bool:
    """Whether a path is meant as an ONNX file."""
    return path.suffix == ".onnx" and not path.is_dir()


def _onnx(path: Path, checkpoint: Path | None) -> Source:
    if checkpoint is not None:
        raise Error(f"{path} has its weights itself, so --checkpoint {checkpoint} has no place")
    module = _imported(path)
    if module.local and module.mesh.ranks > 1:
        raise Error(
            f"{path} is the program of one rank of {module.mesh.ranks} and has that one's weights; "
            f"compile what all ranks have: {path.parent / MODULE}, or the source of both"
        )
    if is_artifact(path.parent):
        return Source(module, path.parent, list(read_manifest(path.parent).get("end_tokens", ())))
    return Source(module, path.parent)


def _imported(path: Path) -> Module:
    """The module in an ONNX file, nodes of plugins of the user's own read as their operations."""
    from ..backends.tensorrt.plugins import fields_of, users
    from ..frontends.onnx import import_onnx
    from ..frontends.onnx.plugins import Plugin

    known = {spec.key: Plugin(spec.operation, partial(fields_of, spec)) for spec in users()}
    return import_onnx(path, plugins=known)


def _nothing(path: Path) -> Error:
    return Error(
        f"there is no {path}; a source is script.py[:factory], a checkpoint folder, "
        "an artifact folder, a module's text, or model.onnx"
    )


def _text(path: Path, checkpoint: Path | None) -> Source:
    module = read_module(path)
    for name, file in module.files.items():
        module.files[name] = str(path.parent / file)
    if checkpoint is not None:
        _point_at(module, checkpoint, path)
    for file in module.files.values():
        if in_artifact(path) and not Path(file).is_file():
            raise Error(
                f"the weights of {path.parent} lie in {os.path.abspath(file)}, which is gone; put "
                "it back, or give --checkpoint with the folder where it is now"
            )
    if in_artifact(path):
        return Source(module, path.parent, ends_of(path))
    return Source(module, checkpoint)


def _point_at(module: Module, checkpoint: Path, path: Path) -> None:
    """Let a module whose weights have their files read these from another folder."""
    from ..frontends.huggingface.binding import has_unbound

    if has_unbound(module):
        return
    known: dict[str, Any] = read_manifest(path.parent)["weights"] if in_artifact(path) else {}
    elsewhere = [name for name, file in module.files.items() if Path(file).parent != path.parent]
    if not elsewhere:
        raise Error(f"the weights lie beside {path}, so --checkpoint has no effect; leave it out")
    entries = {Path(name).name: entry for name, entry in known.items()}
    for name in elsewhere:
        found = checkpoint / Path(module.files[name]).name
        if not found.is_file():
            raise Error(f"{path} refers to {found.name}, which is not in {checkpoint}")
        if found.name in entries:
            _check_same(found, entries[found.name], path)
        module.files[name] = str(found)


def _check_same(found: Path, entry: Mapping[str, Any], path: Path) -> None:
    """An Error where a weight file is not the one that the artifact with `path` was made with."""
    size, again = found.stat().st_size, "give the checkpoint that it was made with"
    if size != entry["size"]:
        raise Error(
            f"{found} has {size} bytes, and {path} was made with a file of {entry['size']}; {again}"
        )
    if sampled(found) != entry["hash"]:
        raise Error(f"{found} holds other bytes than the file {path} was made with; {again}")


def _check_unchanged(src: Path, checkpoint: Path | None) -> None:
    """An Error where a file of an artifact, or a weight file, is no longer what was compiled.

    The text may have been edited.
    """
    folder = src if src.is_dir() else src.parent
    if not (src.is_dir() or src.name == MODULE or is_onnx(src)) or not is_artifact(folder):
        return
    manifest = read_manifest(folder)
    manifest["files"] = {n: entry for n, entry in manifest["files"].items() if n != MODULE}
    if checkpoint is not None:
        manifest["weights"] = {}  # those of the checkpoint have been compared
    try:
        check(folder, manifest)
    except Error as error:
        error.add_note(
            f"{folder} is the source here: put the file back as it was, or compile what the "
            "artifact was made from"
        )
        raise


def in_artifact(path: Path) -> bool:
    """Whether a file is the text of an artifact."""
    return path.name == MODULE and is_artifact(path.parent)


def ends_of(path: Path) -> list[int]:
    """The ids that end a text of the model in the file `path`, by what lies beside it."""
    if in_artifact(path):
        return list(read_manifest(path.parent).get("end_tokens", ()))
    from ..generation.tokenizer import end_tokens

    return end_tokens(path.parent)


def _no_effect(what: str, dtype: str | None, settings: Mapping[str, Any]) -> None:
    if dtype is not None:
        raise Error(
            f"{what} says its dtypes itself, so --dtype {dtype} has no effect; leave it out"
        )
    for name in settings:
        raise Error(f"{what} has no settings, so --set {name}=... has no effect; leave it out")


def _finish(
    source: Source, checkpoint: Path | None, dims: Dims, random_weights: int | None
) -> None:
    """Bind what is unbound, set the ranges, make paths absolute, find the end of texts."""
    module = source.module
    from ..frontends.huggingface.binding import has_unbound

    if checkpoint is not None and has_unbound(module):
        from ..frontends.huggingface import bind

        bind(module, checkpoint)
    if random_weights is not None:
        from ..frontends.random_weights import random_weights as fill

        if not has_unbound(module):
            raise Error(
                "every weight has its values already, so --random-weights has no effect; "
                "leave it out"
            )
        fill(module, random_weights)
    set_dims(module, dims)
    for name, file in module.files.items():
        module.files[name] = _written(os.path.abspath(file))
    if source.folder is not None and not source.ends:
        from ..generation.tokenizer import end_tokens

        source.ends = end_tokens(source.folder)


def _written(path: str) -> str:
    """`path`; an Error where an artifact, which is text, cannot name it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="backslashreplace").decode()
        raise Error(f"the path {shown} is not UTF-8; rename it, or give a link to it") from None
    return path


def set_dims(module: Module, dims: Dims) -> None:
    """Replace ranges of symbols that a module has."""
    known = dict.fromkeys([*module.dims, *_symbols(module)])
    for name, bounds in checked_ranges(dims, known).items():
        module.dims[name] = bounds
        if bounds[2] < 1 and name in _capacities(module):
            raise Error(
                f"caches of the capacity {name}=0 hold nothing; give more with --dims {name}=N"
            )


def _capacities(module: Module) -> set[str]:
    """The symbols in the capacities of key-value caches."""
    capacities = (op.operands[0].type.shape[2] for op in module.ops() if op.opname == _CACHES)
    return {name for dim in capacities if isinstance(dim, Dim) for name in dim.symbols()}


def _symbols(module: Module) -> Iterator[str]:
    """The symbols in the types of the arguments, with repetitions."""
    for arg in module.main.args if module.functions else ():
        for dim in arg.type.shape:
            if isinstance(dim, Dim):
                yield from dim.symbols()
