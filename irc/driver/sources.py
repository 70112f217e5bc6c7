"""What can be compiled: a script, a checkpoint, text, an ONNX file, an artifact, a module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..artifact.folder import ArtifactFolder, weights_problem
from ..artifact.manifest import MODULE
from ..errors import Error
from ..files import open_file, stays_in
from ..ir.core import Module
from ..ir.dims import Dim, DimLike, Dims, checked_ranges
from ..ir.mesh import Mesh
from ..ir.verify import verify
from ..text import parse_module
from ..text.printer import print_module

PathLike: TypeAlias = str | os.PathLike[str]
DTYPES = ("f32", "f16", "bf16")
SOURCE_OPTIONS = ("checkpoint", "dtype", "settings", "dims", "random_weights", "trust")


@dataclass
class Source:
    """A module before any pass, and what its checkpoint holds beside the weights.

    `folder` has the tokenizer files, `end_tokens` are the token ids that end a text. `artifact` is
    the one that the module was read from, if any. `trust`: links of tokenizer files are followed.
    """

    module: Module
    folder: Path | None = None
    end_tokens: list[int] = field(default_factory=list[int])
    artifact: ArtifactFolder | None = None
    trust: bool = False


def artifact_of(src: PathLike | Module) -> ArtifactFolder | None:
    """The artifact that a source is, or whose module.irc or ONNX file it is."""
    _check_kind(src)
    if isinstance(src, Module):
        return None
    path = Path(src)
    if path.is_dir():
        return ArtifactFolder.find(path)
    return ArtifactFolder.find(path.parent) if path.name == MODULE or is_onnx(path) else None


def find_source(
    src: PathLike | Module,
    checkpoint: PathLike | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    random_weights: int | None = None,
    bound: bool = True,
    artifact: ArtifactFolder | None = None,
    trust: bool = False,
) -> Source:
    """The module that `src` describes, its weights bound and its files by absolute paths.

    A module is copied, so that passes leave it as it is.

    `settings` are the keyword arguments of a script's factory; a checkpoint folder has one,
    `ignore`: keys of its config.json that do not matter, and patterns of tensors that the model
    does not use, separated by commas. Unless weights are to be `bound`, a checkpoint folder needs
    its config.json only, and the files of an artifact are not compared with its manifest.
    `artifact` is `artifact_of(src)` where the caller has it. Files that a text or an artifact names
    outside its folder are foreign, and an ONNX file may name none, without the user's `trust`.
    """
    _check_kind(src)
    if checkpoint is not None and random_weights is not None:
        raise Error("give --checkpoint or --random-weights, not both")
    if dtype is not None and dtype not in DTYPES:
        raise Error(f"no compute type called {dtype!r}; there are {', '.join(DTYPES)}")
    folder = None if checkpoint is None else Path(checkpoint)
    settings = settings or {}
    artifact = artifact or artifact_of(src)
    if isinstance(src, Module):
        _check_unused("a module", dtype, settings)
        verify(src)
        source = Source(parse_module(print_module(src, locs=True), src.name), folder)  # a copy
    elif is_script(os.fspath(src)):
        source = _script(os.fspath(src), folder, dtype, settings)
    elif not Path(src).exists():
        raise Error(
            f"there is no {src}; a source is script.py[:factory], a checkpoint folder, "
            "an artifact folder, a module's text, or model.onnx"
        )
    elif is_onnx(Path(src)):
        _check_unused("an ONNX file", dtype if artifact else None, settings)
        source = _onnx(Path(src), folder, artifact, trust or not bound)
        if dtype is not None:
            from ..passes.convert_floats import ConvertFloats
            from ..pipeline import Stats

            ConvertFloats(dtype).run(source.module, Stats())
    elif Path(src).is_dir() and artifact is None:
        unbound = random_weights is not None or not bound
        source = _checkpoint(Path(src), folder, dtype, settings, unbound)
    else:
        _check_unused("an artifact" if artifact else "a module's text", dtype, settings)
        source = _text(artifact.module if artifact else Path(src), folder, artifact, trust)
    if bound and artifact is not None:
        _check_unchanged(artifact, folder)
    _finish(source, folder, dims or {}, random_weights)
    source.trust = trust
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
        return _imported(path, trust=True)  # to be shown
    return read_text(ArtifactFolder.open(path).module if path.is_dir() else path)


# Files of models that are no source, by how their names end.
_FOLDER = "compile the checkpoint folder with config.json and *.safetensors"
_NO_SOURCE = {
    ".gguf": f"a model of llama.cpp, which irc does not read; {_FOLDER} that it was made from",
    ".safetensors": f"weights without a model; {_FOLDER}",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), f"no source of irc; {_FOLDER}"),
    **dict.fromkeys((".engine", ".plan"), "an engine; give the artifact folder, or its source"),
}


def check_source(path: Path) -> None:
    """An Error about a file in a format of others, with what to give instead."""
    reason = _NO_SOURCE.get(path.suffix.lower())
    if reason is not None and path.is_file():
        raise Error(f"{path} is {reason}")


def read_text(path: Path) -> Module:
    """The module in a text file."""
    check_source(path)
    try:
        with open_file(path) as file:
            return parse_bytes(file.read(), str(path))
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None


def parse_bytes(text: bytes, name: str) -> Module:
    """The module in a text in UTF-8; `name` is its place in messages."""
    try:
        return parse_module(text.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        raise Error(f"{name} is not text in UTF-8 (byte {error.start} is wrong)") from None


def is_script(src: str) -> bool:
    """Whether a source is a `script.py[:factory]`, by its name."""
    from ..frontends.script import split_name

    return split_name(src)[0].suffix == ".py"


def is_onnx(path: Path) -> bool:
    """Whether a path is an ONNX file, by its name."""
    return path.suffix == ".onnx" and not path.is_dir()


def _script(
    src: str, checkpoint: Path | None, dtype: str | None, settings: Mapping[str, Any]
) -> Source:
    from ..frontends.script import load_script

    place = None if checkpoint is None else str(checkpoint)
    return Source(load_script(_in_utf8(src), settings, place, dtype), checkpoint)


def _checkpoint(
    path: Path,
    checkpoint: Path | None,
    dtype: str | None,
    settings: Mapping[str, Any],
    unbound: bool,
) -> Source:
    from ..frontends import huggingface

    _check_own(f"{path} is a checkpoint itself", checkpoint)

    for name in settings.keys() - {"ignore"}:
        raise Error(f"a checkpoint folder has no setting {name!r}; it takes ignore=key,key")
    ignored = [key.strip() for key in str(settings.get("ignore", "")).split(",") if key.strip()]
    config = huggingface.read_config(path)
    if huggingface.is_of_tensorrt_llm(config):
        from ..frontends.checkpoints import tensorrt_llm

        if unbound:
            return Source(tensorrt_llm.trace(config, dtype, ignored), path)
        return Source(tensorrt_llm.load(path, dtype, ignore=ignored), path)
    if not unbound:
        return Source(huggingface.load(path, dtype, ignore=ignored), path)
    model = huggingface.model_of(config, ignored)
    return Source(model.trace(dtype or huggingface.checkpoint_dtype(config)), path)


def _check_own(why: str, checkpoint: Path | None) -> None:
    if checkpoint is not None:
        raise Error(f"{why}, so --checkpoint {checkpoint} has no effect; leave it out")


def _onnx(
    path: Path, checkpoint: Path | None, artifact: ArtifactFolder | None, trust: bool
) -> Source:
    _check_own(f"{path} has its own weights", checkpoint)
    if artifact is not None:
        _check_one_rank(path, Mesh.parse(artifact.manifest["mesh"]))
    module = _imported(path, trust)
    if module.local:
        _check_one_rank(path, module.mesh)
    return Source(module, path.parent, artifact.end_tokens if artifact else [], artifact)


def _check_one_rank(path: Path, mesh: Mesh) -> None:
    if mesh.ranks > 1:
        raise Error(
            f"{path} is the program of one rank of {mesh.ranks} and has the weights of that rank "
            f"only; compile {path.parent / MODULE}, or the source of both"
        )


def _imported(path: Path, trust: bool) -> Module:
    """The module in an ONNX file; nodes of the user's plugins are read as their operations."""
    from ..backends.tensorrt.plugins import fields_of, users
    from ..frontends.onnx import import_onnx
    from ..frontends.onnx.rules import Plugin

    known = {spec.key: Plugin(spec.operation, partial(fields_of, spec)) for spec in users()}
    return import_onnx(path, plugins=known, trust=trust)


def _text(
    path: Path, checkpoint: Path | None, artifact: ArtifactFolder | None, trust: bool
) -> Source:
    module = read_text(path)
    for name, file in module.files.items():
        module.files[name] = str(path.parent / file)
    if checkpoint is not None:
        _move_files(module, checkpoint, path, artifact)
    if not trust:
        module.foreign = frozenset(
            name
            for name, file in module.files.items()
            if Path(file).parent != checkpoint and not stays_in(file, path.parent)
        )
    if artifact is None:
        return Source(module, checkpoint)
    return Source(module, path.parent, artifact.end_tokens, artifact)


def _move_files(
    module: Module, checkpoint: Path, path: Path, artifact: ArtifactFolder | None
) -> None:
    """Let a module whose weights are bound to files read these from another folder."""
    from ..frontends.huggingface.binding import has_unbound

    if has_unbound(module):
        return
    elsewhere = [name for name, file in module.files.items() if Path(file).parent != path.parent]
    if not elsewhere:
        _check_own(f"the weights are in the folder of {path}", checkpoint)
    weights = artifact.manifest["weights"] if artifact else {}
    entries = {Path(name).name: entry for name, entry in weights.items()}
    for name in elsewhere:
        found = checkpoint / Path(module.files[name]).name
        if not found.is_file():
            raise Error(f"{path} refers to {found.name}, which is not in {checkpoint}")
        if found.name in entries:
            problem = weights_problem(
                found, entries[found.name], "give the checkpoint that the model was compiled with"
            )
            if problem:
                raise Error(problem)
        module.files[name] = str(found)


def _check_unchanged(artifact: ArtifactFolder, checkpoint: Path | None) -> None:
    """An Error where a file of an artifact, or a weight file, is no longer as compiled.

    The text may have been edited. Files of a `checkpoint` have been compared by `_move_files`.
    """
    try:
        artifact.check(text=False, weights=checkpoint is None)
    except Error as error:
        back = "put the file back as it was, give --checkpoint, or compile what it was made from"
        error.add_note(f"{artifact.path} is the source here: {back}")
        raise


def _check_unused(what: str, dtype: str | None, settings: Mapping[str, Any]) -> None:
    """An Error about an option of scripts and checkpoints."""
    if dtype is not None:
        raise Error(f"{what} states its dtypes, so --dtype {dtype} has no effect; leave it out")
    for name in settings:
        raise Error(f"{what} has no settings, so --set {name}=... has no effect; leave it out")


def _finish(
    source: Source, checkpoint: Path | None, dims: Dims, random_weights: int | None
) -> None:
    """Bind unbound weights, set ranges, make paths absolute, find the tokens that end a text."""
    module = source.module
    from ..frontends.huggingface.binding import has_unbound

    if checkpoint is not None and has_unbound(module):
        from ..frontends.huggingface import bind

        bind(module, checkpoint)
    if random_weights is not None:
        from ..frontends.random_weights import random_weights as fill

        if not has_unbound(module):
            why = (
                "every weight has its values already" if module.weights else "there are no weights"
            )
            raise Error(f"{why}, so --random-weights has no effect; leave it out")
        fill(module, random_weights)
    _set_dims(module, dims)
    for name, file in module.files.items():
        module.files[name] = _in_utf8(os.path.abspath(file))
    if source.folder is not None and source.artifact is None:
        from ..generation.tokenizer import end_tokens

        source.end_tokens = end_tokens(source.folder)


def _in_utf8(path: str) -> str:
    """`path`; an Error where the text of a module cannot hold it, or no file can have it."""
    if "\0" in path:
        raise Error(f"the path {path!r} has a NUL character; correct it")
    shown = path.encode(errors="backslashreplace").decode()
    if shown != path:
        raise Error(f"the path {shown} is not UTF-8; rename it, or give a link to it")
    return path


def _set_dims(module: Module, dims: Dims) -> None:
    """Replace ranges of symbols that a module has."""
    shapes = [arg.type.shape for arg in module.main.args] if module.functions else []
    known = dict.fromkeys([*module.dims, *_symbols(dim for shape in shapes for dim in shape)])
    for name, bounds in checked_ranges(dims, known).items():
        module.dims[name] = bounds


def _symbols(dims: Iterable[DimLike]) -> Iterator[str]:
    """The symbols in dimensions, with repetitions."""
    return (name for dim in dims if isinstance(dim, Dim) for name in dim.symbols())
