"""`EncoderDecoder`: an encoder that reads a source once, and the decoder that writes the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Error
from .decoding import most_rows
from .encoder_inputs import encoder_inputs
from .inputs import Arrays, check_prompt
from .model import Model
from .search import Completion
from .settings import GenerationSettings


class EncoderDecoder(Model):
    """A model of two programs, those of the parts `encoder` and `decoder` of one checkpoint.

    Prompts are what the encoder reads. Of an encoder of other inputs than tokens, such as the
    `input_features` of speech, those are `extra`, and prompts are how the answers begin: texts
    such as "<|startoftranscript|><|en|>", or token ids; "" is the decoder's start token alone.
    """

    def __init__(self, encoder: Model, decoder: Model) -> None:
        super().__init__(
            decoder.program, decoder.dims, decoder.folder, decoder.ends, decoder.module
        )
        self.encoder = encoder
        given = {port.name for port in encoder.program.ports.outputs}
        needed = {port.name for port in decoder.program.ports.inputs if "cross_" in port.name}
        if not needed or needed - given:
            raise Error(
                f"{encoder.folder} and {decoder.folder} are not the encoder and the decoder of one "
                "checkpoint; compile it with --set part=encoder, and with --set part=decoder"
            )

    def completions(
        self,
        prompts: Sequence[str | Sequence[int]],
        settings: GenerationSettings | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        **hooks: Any,
    ) -> list[list[Completion]]:
        """The answers to each source, see `Model.completions`."""
        ids = [self.encoded(prompt) for prompt in prompts]
        if self._reads_tokens:
            state = self.encode(ids)
            ids = [[self._start] for _ in prompts]
        else:
            state = self.encoder.run(extra or {})
        return super().completions(ids, settings, extra={**(extra or {}), **state}, **hooks)

    def encoded(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The token ids of a source, or those with which an answer begins."""
        if self._reads_tokens:
            return super().encoded(prompt)
        ids = self.tokenizer.encode(prompt, special=False) if isinstance(prompt, str) else prompt
        return ids if ids and ids[0] == self._start else [self._start, *ids]

    def encode(self, sources: Sequence[Sequence[int]]) -> Arrays:
        """What the encoder returns for token ids, with `encoder_lengths`: inputs of the decoder."""
        for source in sources:
            check_prompt(source, None)
        parts: list[Arrays] = []
        rows = most_rows(self.encoder.program.ports, self.encoder.dims)
        width = max(map(len, sources), default=1)
        for first in range(0, len(sources), rows):
            inputs, _ = encoder_inputs(self.encoder, sources[first : first + rows], width)
            parts.append({**inputs, **self.encoder.run(inputs)})
        return {
            name: np.concatenate([part[name] for part in parts])[: len(sources)]
            for name in parts[0]
            if name != "input_ids"
        }

    @property
    def _reads_tokens(self) -> bool:
        return any(port.name == "input_ids" for port in self.encoder.program.ports.inputs)

    @property
    def _start(self) -> int:
        start = self.checkpoint.decoder_start_token_id
        if start is None:
            raise Error(
                f"{self.folder} has no generation_config.json with a decoder_start_token_id, with "
                "which answers begin; add it to the checkpoint and compile again"
            )
        return start
