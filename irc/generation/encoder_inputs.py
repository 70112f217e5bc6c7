"""`encoder_inputs`: token ids of several lengths as one padded call of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .decoding import multiple_of_ids
from .model import Model

Array: TypeAlias = np.ndarray[Any, Any]


def encoder_inputs(
    model: Model, prompts: Sequence[Sequence[int]], width: int
) -> tuple[dict[str, Array], Array]:
    """The inputs of a call, and i32 [rows, tokens], which has 1 for a token, 0 for padding.

    There are at least `width` tokens. Rows that a mesh needs besides have one token.
    """
    ports, sizes = model.program.ports, (len(prompts), width)
    steps = [multiple_of_ids(ports, at) for at in range(2)]
    rows, width = (-(-size // step) * step for size, step in zip(sizes, steps, strict=True))
    ids, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    mask = (np.arange(width) < lengths[:, None]).astype(np.int32)
    values = {"input_ids": ids, "attention_mask": mask, "encoder_lengths": lengths}
    names = {port.name for port in ports.inputs}
    return {name: value for name, value in values.items() if name in names}, mask
