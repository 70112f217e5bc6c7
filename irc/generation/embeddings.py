"""`embed`: vectors of texts by an encoder, in batches of texts of similar lengths."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..json_files import read_object
from .decoding import most_rows
from .encoder_inputs import encoder_inputs
from .inputs import check_prompt
from .model import Model
from .quality import longest_call

Array: TypeAlias = np.ndarray[Any, Any]

_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "encoder_lengths"}
_POOLED = ("sentence_embedding", "text_embeds")  # results [B, D], the first that there is
_STATES = "last_hidden_state"  # [B, S, D]
_TOKENS = 8192  # of a call, padding included: larger ones take memory and save no time
# The longest text, by the files of sentence-transformers, else of transformers.
_LONGEST = {
    "sentence_bert_config.json": "max_seq_length",
    "tokenizer_config.json": "model_max_length",
}


def embed(model: Model, texts: Sequence[str] | Sequence[Sequence[int]]) -> Array:
    """Vectors f32 [n, D] of n texts, or of n lists of token ids with their special tokens.

    They are what a folder of sentence-transformers defines, or a text encoder of CLIP; of any other
    encoder the mean of the last hidden states over the tokens, as sentence-transformers has it.
    A longer text than the model takes is cut, with a warning; longer token ids are an Error.
    """
    if not gives_embeddings(model):
        raise Error(
            f"this model gives no embeddings of texts: its outputs are {', '.join(_outputs(model))}"
            "; compile a folder of sentence-transformers, or an encoder without a head (BertModel "
            "and the like in architectures of config.json)"
        )
    if not texts:
        raise Error("there are no texts; give at least one")
    longest = longest_text(model)
    prompts = [model.encoded(text) for text in texts]
    too_long = [at for at, prompt in enumerate(prompts) if len(prompt) > longest]
    for at in too_long:
        text = texts[at]
        if not isinstance(text, str):
            raise Error(f"a text has {len(text)} tokens, but this model takes {longest}; cut it")
        prompts[at] = model.tokenizer.encode_cut(text, longest)
    if too_long:
        what = f"{len(too_long)} of {len(texts)} texts have more than {longest} tokens"
        warnings.warn(f"{what}; this model takes only the beginning of them", stacklevel=2)
    for prompt in prompts:
        check_prompt(prompt, 2**31)
    rows, vectors = most_rows(model.program.ports, model.dims), dict[int, Array]()
    order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
    while len(vectors) < len(order):
        batch = order[len(vectors) :][:rows]
        batch = batch[: max(1, _TOKENS // len(prompts[batch[0]]))]
        rows_of_call = _vectors(model, [prompts[at] for at in batch])
        vectors |= zip(batch, rows_of_call, strict=False)
    return np.stack([vectors[at] for at in range(len(prompts))])


def gives_embeddings(model: Model) -> bool:
    """Whether a model takes token ids alone and returns embeddings of them."""
    ports = model.program.ports
    inputs = {port.name for port in (*ports.inputs, *ports.states)}
    gives = any(name in _outputs(model) for name in (*_POOLED, _STATES))
    return "input_ids" in inputs and inputs <= _INPUTS and gives


def longest_text(model: Model) -> int:
    """The most tokens of a text, special ones included, by the program and the folder's files."""
    for name, key in _LONGEST.items():
        path = model.folder / name
        value = read_object(path).get(key) if path.is_file() else None
        if isinstance(value, int) and value > 0:
            return longest_call(model, value)
    return longest_call(model, 2**31)


def _outputs(model: Model) -> list[str]:
    return [port.name for port in model.program.ports.outputs]


def _vectors(model: Model, prompts: Sequence[Sequence[int]]) -> Array:
    """f32 [rows, D] of one call; rows behind those of the prompts mean nothing."""
    inputs, mask = encoder_inputs(model, prompts, max(map(len, prompts)))
    results = model.run(inputs)
    for name in _POOLED:
        if name in results:
            return results[name].astype(np.float32)
    weights = mask[..., None].astype(np.float32)
    return (results[_STATES] * weights).sum(1) / weights.sum(1)
