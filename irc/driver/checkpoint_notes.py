"""Notes about what a checkpoint folder holds and a compiled model does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..generation.checkpoint_settings import FILE, ignored_settings, settings_in
from ..json_files import read_object
from .sources import Source

# What training writes beside the weights of a model.
_TRAINING = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def checkpoint_notes(source: Source) -> list[str]:
    """Sentences about the files of the checkpoint folder of a compiled source, if there is one."""
    module, folder, config, notes = source.module, source.folder, source.config, list[str]()
    if folder is None or source.artifact is not None:
        return notes
    longest, trained = module.dims.get("C", (0, 0, 0))[2], config.get("max_position_embeddings")
    if isinstance(trained, int) and longest > trained:
        notes.append(
            f"C={longest} is beyond max_position_embeddings={trained} of config.json: texts longer "
            "than the model was made for"
        )
    ignored = [*_ignored_settings(folder, config), *_ignored_files(source, folder)]
    return [*notes, f"ignored in {folder}: {'; '.join(ignored)}"] if ignored else notes


def _ignored_settings(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """The settings of text generation that change what transformers generates."""
    if names := ignored_settings(_object(folder / FILE)):
        yield f"{', '.join(names)} of {FILE} (irc generate has no such setting)"
    if not (folder / FILE).is_file() and (names := settings_in(config)):
        yield f"{', '.join(names)} of config.json (put them into {FILE})"
    named = _object(folder / "tokenizer_config.json").get("chat_template")
    if named or any(folder.glob("chat_template.*")):
        yield "the chat template without irc generate --chat"


def _ignored_files(source: Source, folder: Path) -> Iterator[str]:
    """The files, and tensors, of which other tools make another model."""
    from ..frontends.huggingface import adapters
    from ..frontends.huggingface.files import PICKLES, Checkpoint
    from ..frontends.models import FAMILIES

    read = {Path(file).name for file in source.module.files.values()}
    if (folder / adapters.CONFIG).is_file() and adapters.WEIGHTS not in read:
        yield f"{adapters.CONFIG} (give --adapter {folder} to merge the adapter)"
    pickles = [path.name for path in sorted(folder.iterdir()) if path.name.endswith(PICKLES)]
    pickles = [name for name in pickles if not name.startswith(_TRAINING)]
    if pickles and read:
        yield f"{pickles[0]}{', ...' * (len(pickles) > 1)} (weights are those of *.safetensors)"
    if source.config.get("auto_map"):
        yield "auto_map of config.json (irc runs no code of checkpoints)"
    names = source.config.get("architectures") or [""]
    key = source.config.get("model_type", ""), names[0]
    family = FAMILIES.get(key) if source.kind == "checkpoint" else None
    keys = Checkpoint(folder) if family and family.unused and read else ()
    for pattern in family.unused if family else ():
        if count := sum(fnmatchcase(key, pattern) for key in keys):
            yield f"{count} tensors {pattern} (irc computes the rest of the model)"


def _object(path: Path) -> Mapping[str, Any]:
    """The object in a file; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}
