"""Notes about what a checkpoint folder holds and a compiled model does not use."""

from __future__ import annotations

from typing import Any

from ..json_files import read_object
from .sources import Source

# What changes how transformers chooses tokens, by the value that changes nothing.
_CHOICE: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": (),
    "suppress_tokens": (),
    "forced_eos_token_id": (),
}


def checkpoint_notes(source: Source) -> list[str]:
    """Sentences about the files of the checkpoint folder of a compiled source, if there is one."""
    module, folder, config, notes = source.module, source.folder, source.config, list[str]()
    if folder is None or source.artifact is not None:
        return notes
    path = folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    longest, trained = module.dims.get("C", (0, 0, 0))[2], config.get("max_position_embeddings")
    if isinstance(trained, int) and longest > trained:
        notes.append(
            f"C={longest} is beyond max_position_embeddings={trained} of config.json: texts longer "
            "than the model was made for"
        )
    if (folder / "adapter_config.json").is_file():
        notes.append(
            "adapter_config.json is ignored: to use the adapter, merge it into the weights first "
            "(merge_and_unload of peft)"
        )
    given = {**config, **generation}
    ignored = [name for name, no in _CHOICE.items() if (given.get(name) or no) != no]
    if ignored:
        notes.append(
            f"{', '.join(ignored)} of the checkpoint: ignored, irc generate chooses greedily"
        )
    return notes
