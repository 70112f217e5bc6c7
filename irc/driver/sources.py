"""What can be compiled: a script, a checkpoint, text, an ONNX file, an artifact, a module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..argument_checks import whole_number_in
from ..artifact.folder import ArtifactFolder, weights_problem
from ..artifact.manifest import MODULE
from ..errors import Error
from ..files import open_file, stays_in
from ..ir.core import Module
from ..ir.dims import Dim, DimLike, Dims, checked_ranges
from ..ir.mesh import Mesh
from ..ir.verify import verify
from ..json_files import read_object
from ..pipeline.options import PATHS, option, options_of
from ..text import parse_module
from ..text.printer import print_module

PathLike: TypeAlias = str | os.PathLike[str]


def ranges(text: str) -> dict[str, tuple[int, int, int]]:
    """`B=1:4:16,S=128` as {"B": (1, 4, 16), "S": (128, 128, 128)}."""
    ranges: dict[str, tuple[int, int, int]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        ((name, value),) = setting(item).items()
        numbers = [whole_number_in(part.strip()) for part in value.split(":")]
        low, typical, high = numbers if len(numbers) == 3 else (numbers * 3)[:3]
        if len(numbers) not in (1, 3) or low is None or typical is None or high is None:
            raise Error(f"{item!r} is not name=min:typical:max")
        ranges = disjoint(ranges, {name: (low, typical, high)})
    return ranges


def setting(text: str) -> dict[str, str]:
    """`key=value` as an entry."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise Error(f"{text!r} is not key=value")
    return {key.strip(): value}


def disjoint(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """All entries; the keys must differ."""
    for name in first.keys() & second.keys():
        raise Error(f"{name} is given twice")
    return first | second


@dataclass(frozen=True)
class SourceOptions:
    """How a source is read.

    `settings` are the keyword arguments of a script's factory; a checkpoint folder has two.
    `ignore`: keys of its config.json that do not matter, and patterns of tensors that the model
    does not use, separated by commas. `part`: the program of a model with several. Files that a
    text or an artifact names outside its folder are foreign, and an ONNX file may name none,
    without the user's `trust` (decision 0019).
    """

    checkpoint: PathLike | None = option(
        None, "the checkpoint folder of a script or module", metavar="DIR", takes=PATHS
    )
    dtype: Literal["f32", "f16", "bf16"] | None = option(None, "compute in f32, f16 or bf16")
    settings: Mapping[str, Any] | None = option(
        None,
        "an argument of the script's factory; may be repeated",
        flag="--set",
        metavar="KEY=VALUE",
        takes=(Mapping,),
        expects="the arguments of a script's factory by name",
        parse=setting,
        join=disjoint,
    )
    dims: Dims | None = option(
        None,
        "min:typical:max of symbolic dimensions, or one number",
        metavar="B=1:4:16,...",
        parse=ranges,
        join=disjoint,
    )
    random_weights: int | None = option(None, "in place of a checkpoint", metavar="SEED", least=0)
    adapter: PathLike | None = option(
        None, "the folder of a LoRA adapter of PEFT, to merge", metavar="DIR", takes=PATHS
    )
    trust: bool = option(
        False, "copy what SRC refers to outside its folder: you trust who wrote SRC"
    )

    @property
    def folder(self) -> Path | None:
        """The checkpoint as a path."""
        return Path(self.checkpoint) if self.checkpoint else None


@dataclass
class Source:
    """A module before any pass, and what its checkpoint holds beside the weights.

    `kind`: module, script, checkpoint, text, onnx, or artifact (its folder). `folder` has the
    tokenizer files, `end_tokens` are the token ids that end a text. `artifact` is the one that the
    module was read from, if any. `trust`: links of tokenizer files are followed.
    """

    kind: str
    module: Module
    folder: Path | None = None
    end_tokens: list[int] = field(default_factory=list[int])
    artifact: ArtifactFolder | None = None
    trust: bool = False

    @property
    def config_path(self) -> str:
        """The config.json of its checkpoint folder, "" where there is none."""
        path = None if self.folder is None or self.artifact else self.folder / "config.json"
        return str(path) if path is not None and path.is_file() else ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The object in that file."""
        return read_object(Path(self.config_path)) if self.config_path else {}


def artifact_of(src: PathLike | Module) -> ArtifactFolder | None:
    """The artifact that a source is, or whose module.irc or ONNX file it is."""
    if isinstance(src, Module):
        return None
    path = Path(src)
    if path.is_dir():
        return ArtifactFolder.find(path)
    return ArtifactFolder.find(path.parent) if path.name == MODULE or is_onnx(path) else None


def find_source(src: PathLike | Module, *, bound: bool = True, **options: Any) -> Source:
    """The module that `src` describes, its weights bound and its files by absolute paths.

    A module is copied, so that passes leave it as it is. Unless weights are to be `bound`, a
    checkpoint folder needs its config.json only, and the files of an artifact are not compared with
    its manifest. `options` are those of SourceOptions.
    """
    _check_kind(src)
    given = options_of(SourceOptions, options, "a source")
    if given.checkpoint and given.random_weights is not None:
        raise Error("give --checkpoint or --random-weights, not both")
    if given.folder is not None and not given.folder.is_dir():
        raise Error(f"there is no checkpoint folder {given.folder}{_hub_hint(given.folder)}")
    source = _read(src, given, bound)
    if bound and source.artifact is not None:
        _check_unchanged(source.artifact, given.folder)
    _finish(source, given)
    source.trust = given.trust
    return source


def _hub_hint(place: PathLike) -> str:
    from ..frontends.huggingface.files import hub_hint

    return hub_hint(place)


def _check_kind(src: object) -> None:
    if not isinstance(src, (Module, str, os.PathLike)):
        raise Error(
            f"the source is a {type(src).__name__}; give a path or a module of irc (an ONNX model "
            "in memory becomes a file with onnx.save)"
        )


def _read(src: PathLike | Module, given: SourceOptions, bound: bool) -> Source:
    if isinstance(src, Module):
        _check_unused("a module", given)
        verify(src)
        copy = parse_module(print_module(src, locs=True), src.name)
        return Source("module", copy, given.folder)
    if is_script(os.fspath(src)):
        return _script(os.fspath(src), given)
    path, artifact = Path(src), artifact_of(src)
    if not path.exists():
        raise Error(
            f"there is no {src}; a source is script.py[:factory], a checkpoint folder, "
            f"an artifact folder, a module's text, or model.onnx{_hub_hint(src)}"
        )
    if is_onnx(path):
        return _onnx(path, given, artifact, given.trust or not bound)
    if artifact is not None:
        _check_unused("an artifact", given)
        return _text(artifact.module, given, artifact, "artifact" if path.is_dir() else "text")
    if path.is_dir():
        return _checkpoint(path, given, given.random_weights is not None or not bound)
    _check_unused("a module's text", given)
    return _text(path, given)


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


def _script(src: str, given: SourceOptions) -> Source:
    from ..frontends.script import load_script

    place = None if given.folder is None else str(given.folder)
    module = load_script(_in_utf8(src), given.settings or {}, place, given.dtype)
    return Source("script", module, given.folder)


def _checkpoint(path: Path, given: SourceOptions, unbound: bool) -> Source:
    from ..frontends import huggingface

    _check_own(f"{path} is a checkpoint itself", given.folder)
    settings, dtype = given.settings or {}, given.dtype
    for name in settings.keys() - {"ignore", "part"}:
        takes = "ignore=key,key and part=name"
        raise Error(f"a checkpoint folder has no setting {name!r}; it takes {takes}")
    part = str(settings.get("part", ""))
    ignored = [key.strip() for key in str(settings.get("ignore", "")).split(",") if key.strip()]
    config = huggingface.read_config(path)
    if huggingface.is_of_tensorrt_llm(config):
        _check_no_adapter("checkpoints of TensorRT-LLM", given)
        from ..frontends.checkpoints import tensorrt_llm

        if part:
            raise Error(f"{path} is a TensorRT-LLM checkpoint, which has no part {part!r}")
        trace, load = tensorrt_llm.trace, tensorrt_llm.load
        module = trace(config, dtype, ignored) if unbound else load(path, dtype, ignore=ignored)
    elif unbound:
        if given.adapter:
            huggingface.check_adapter(given.adapter, ignored)
        model = huggingface.model_of(config, ignored, part)
        module = model.trace(dtype or huggingface.checkpoint_dtype(config))
    else:
        module = huggingface.load(path, dtype, ignore=ignored, part=part, adapter=given.adapter)
    source = Source("checkpoint", module, path)
    source.config = config
    return source


def _check_own(why: str, checkpoint: Path | None) -> None:
    if checkpoint is not None:
        raise Error(f"{why}, so --checkpoint {checkpoint} has no effect; leave it out")


def _onnx(path: Path, given: SourceOptions, artifact: ArtifactFolder | None, trust: bool) -> Source:
    _check_unused("an ONNX file", given, dtype=artifact is not None)
    _check_own(f"{path} has its own weights", given.folder)
    if artifact is not None:
        _check_one_rank(path, Mesh.parse(artifact.manifest["mesh"]))
    module = _imported(path, trust)
    if module.local:
        _check_one_rank(path, module.mesh)
    if given.dtype is not None:
        from ..passes.convert_floats import ConvertFloats
        from ..pipeline import Stats

        ConvertFloats(given.dtype).run(module, Stats())
    return Source("onnx", module, path.parent, artifact.end_tokens if artifact else [], artifact)


def _check_one_rank(path: Path, mesh: Mesh) -> None:
    if mesh.ranks > 1:
        raise Error(
            f"{path} is the program of one rank of {mesh.ranks} and has the weights of that rank "
            f"only; compile {path.parent / MODULE}, or the source of both"
        )


def _imported(path: Path, trust: bool) -> Module:
    """The module in an ONNX file; nodes of the user's plugins are read as their operations."""
    from ..backends import command_parts
    from ..frontends.onnx import import_onnx
    from ..frontends.onnx.rules import Plugin

    readers = [pair for part in command_parts() for pair in part.importable().items()]
    plugins = {key: Plugin(*reader) for key, reader in readers}
    return import_onnx(path, plugins=plugins, trust=trust)


def _text(
    path: Path, given: SourceOptions, artifact: ArtifactFolder | None = None, kind: str = "text"
) -> Source:
    module, checkpoint = read_text(path), given.folder
    for name, file in module.files.items():
        module.files[name] = str(path.parent / file)
    if checkpoint is not None:
        _move_files(module, checkpoint, path, artifact)
    if not given.trust:
        module.foreign = frozenset(
            name
            for name, file in module.files.items()
            if Path(file).parent != checkpoint and not stays_in(file, path.parent)
        )
    if artifact is None:
        return Source(kind, module, checkpoint)
    return Source(kind, module, path.parent, artifact.end_tokens, artifact)


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
        file = checkpoint / Path(module.files[name]).name
        if not file.is_file():
            raise Error(f"{path} refers to {file.name}, which is not in {checkpoint}")
        if file.name in entries:
            problem = weights_problem(
                file, entries[file.name], "give the checkpoint that the model was compiled with"
            )
            if problem:
                raise Error(problem)
        module.files[name] = str(file)


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


def _check_unused(what: str, given: SourceOptions, dtype: bool = True) -> None:
    """An Error about an option of scripts and checkpoints."""
    if dtype and (kind := given.dtype) is not None:
        raise Error(f"{what} states its dtypes, so --dtype {kind} has no effect; leave it out")
    for name in given.settings or {}:
        raise Error(f"{what} has no settings, so --set {name}=... has no effect; leave it out")


def _check_no_adapter(what: str, given: SourceOptions) -> None:
    if given.adapter:
        raise Error(
            f"--adapter {given.adapter} has no effect on {what}; it is for checkpoint folders of "
            "transformers, and for scripts with --checkpoint"
        )


def _finish(source: Source, given: SourceOptions) -> None:
    """Bind unbound weights, set ranges, make paths absolute, find the tokens that end a text."""
    module = source.module
    from ..frontends.huggingface.binding import has_unbound

    if given.random_weights is not None:
        _check_no_adapter("random weights", given)
    if source.kind != "checkpoint" and (given.folder is None or not has_unbound(module)):
        _check_no_adapter("weights that have their values", given)
    if given.folder is not None and has_unbound(module):
        from ..frontends.huggingface import bind

        bind(module, given.folder, adapter=given.adapter)
    if given.random_weights is not None:
        from ..frontends.random_weights import random_weights as fill

        if not has_unbound(module):
            why = (
                "every weight has its values already" if module.weights else "there are no weights"
            )
            raise Error(f"{why}, so --random-weights has no effect; leave it out")
        fill(module, given.random_weights)
    _set_dims(module, given.dims or {})
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
    symbols = dict.fromkeys([*module.dims, *_symbols(dim for shape in shapes for dim in shape)])
    for name, bounds in checked_ranges(dims, symbols).items():
        module.dims[name] = bounds


def _symbols(dims: Iterable[DimLike]) -> Iterator[str]:
    """The symbols in dimensions, with repetitions."""
    return (name for dim in dims if isinstance(dim, Dim) for name in dim.symbols())
