"""`ModelRunner`: prompts of any lengths to texts of tokens, over one artifact."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from irc.errors import Error

from ..api import api, register
from ..dtypes import as_array
from .configs import ModelConfig, SamplingConfig
from .generation import GenerationSession


@api("runtime.model_runner.ModelRunner")
class ModelRunner:
    """Continues batches of prompts with the language model in an artifact folder.

    It has the attributes of its session too, such as `vocab_size`.
    """

    def __init__(self, session: GenerationSession) -> None:
        self.session = session

    @classmethod
    def from_dir(cls, engine_dir: str | PathLike[str]) -> ModelRunner:
        """The runner of the engine, or artifact, in a folder. All ranks run in this process."""
        return cls(GenerationSession(ModelConfig.from_folder(Path(engine_dir)), engine_dir))

    @classmethod
    def from_engine(cls, engine: Any) -> ModelRunner:
        """The runner of an Engine."""
        return cls(GenerationSession(None, engine))

    def __getattr__(self, name: str) -> Any:
        if "session" not in vars(self):
            raise AttributeError(name)
        return getattr(self.session, name)

    @property
    def max_sequence_length(self) -> int | None:
        """The most tokens of a sequence."""
        config = self.session.config
        return config.max_seq_len or (config.max_input_len or 0) + (config.max_output_len or 0)

    def generate(
        self,
        batch_input_ids: Sequence[Any],
        sampling_config: SamplingConfig | None = None,
        prompt_table: Any = None,
        prompt_tasks: str | None = None,
        streaming: bool = False,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        prompt_table_path: Any = None,
        **fields: Any,
    ) -> Any:
        """What `GenerationSession.decode` returns for prompts of any lengths.

        `prompt_table` is an array [tasks, tokens, hidden], or the .npy file of one. `fields` are
        those of SamplingConfig, which override `sampling_config`, such as `max_new_tokens`.
        """
        lengths = [as_array(each).size for each in batch_input_ids]
        if not lengths or 0 in lengths:
            raise Error("generate got an empty prompt; expected a list of prompts with tokens")
        given: dict[str, Any] = {"end_id": None, "pad_id": None}
        if sampling_config is not None:
            given.update(vars(sampling_config))
        config = SamplingConfig(**given | fields)
        self.session.setup(
            len(lengths),
            max(lengths),
            int(config.max_new_tokens),
            int(config.num_beams),
            max_attention_window_size=config.max_attention_window_size,
            sink_token_length=config.sink_token_length,
        )
        table = prompt_table if prompt_table_path is None else prompt_table_path
        inputs: dict[str, Any] = {} if table is None else _prompt_table(table)
        if prompt_tasks is not None:
            inputs["tasks"] = [int(task) for task in str(prompt_tasks).split(",")]
        return self.session.decode_batch(
            batch_input_ids,
            config,
            streaming=streaming,
            stopping_criteria=stopping_criteria,
            logits_processor=logits_processor,
            inputs=inputs,
        )


def _prompt_table(given: Any) -> dict[str, Any]:
    """The inputs of a table [tasks, tokens, hidden], or of the .npy file of one."""
    table = np.load(str(given)) if isinstance(given, str | Path) else as_array(given)
    if table.ndim != 3:
        raise Error(f"prompt_table has the shape {list(table.shape)}; expected [tasks, tokens, H]")
    flat = table.reshape(-1, table.shape[-1])
    return {"prompt_embedding_table": flat, "prompt_vocab_size": np.array([table.shape[1]])}


ModelRunnerCpp = register("runtime.model_runner_cpp.ModelRunnerCpp", ModelRunner)
