"""`ModelRunner`: prompts of any lengths to texts of tokens, over one artifact."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from irc.errors import Error, did_you_mean
from irc.source import here

from ..dtypes import as_array
from .configs import ModelConfig, SamplingConfig
from .generation import GenerationSession


class ModelRunner:
    """Continues batches of prompts with the language model in an artifact folder."""

    def __init__(self, session: GenerationSession) -> None:
        self.session = session

    @classmethod
    def from_dir(
        cls, engine_dir: str | PathLike[str], lora_dir: Any = None, **without_effect: Any
    ) -> ModelRunner:
        """The runner of an artifact. All ranks run in this process, so `rank` has no effect.

        Neither have `max_batch_size` and the other limits, which the artifact states.
        """
        if lora_dir is not None:
            raise Error(
                "lora_dir is not supported; merge the adapters into the checkpoint", loc=here()
            )
        if without_effect.get("debug_mode"):
            raise Error("debug_mode is not supported; use runtime.Session", loc=here())
        return cls(GenerationSession(ModelConfig(), engine_dir))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, as the logits tell."""
        ports = self.session.artifact.program.ports.outputs
        return next(int(str(port.shape[-1])) for port in ports if port.name == "logits")

    @property
    def dtype(self) -> str:
        """The dtype of most weights, such as "bf16"."""
        return self.session.artifact.manifest["dtype"]

    def generate(
        self,
        batch_input_ids: Sequence[Any],
        sampling_config: SamplingConfig | None = None,
        prompt_table: Any = None,
        prompt_tasks: Any = None,
        lora_uids: Any = None,
        streaming: bool = False,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        **fields: Any,
    ) -> Any:
        """What `GenerationSession.decode` returns for prompts of any lengths.

        `fields` are those of SamplingConfig, which override `sampling_config`; `max_new_tokens` is
        one of them.
        """
        if lora_uids is not None:
            raise Error("lora_uids is not supported; merge the adapters into the checkpoint")
        lengths = [as_array(each).size for each in batch_input_ids]
        if not lengths or 0 in lengths:
            raise Error("generate got an empty prompt; expected a list of prompts with tokens")
        config = SamplingConfig(None)
        config.update(**{**vars(sampling_config), **fields} if sampling_config else fields)
        unknown = [name for name in fields if name not in vars(config)]
        if unknown:
            raise Error(
                f"generate has no argument {unknown[0]!r}{did_you_mean(unknown[0], vars(config))}",
                loc=here(),
            )
        new, beams = int(config.max_new_tokens), int(config.num_beams)
        self.session.setup(len(lengths), max(lengths), new, beams)
        inputs: dict[str, Any] = {} if prompt_table is None else _prompt_table(prompt_table)
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
    import numpy as np

    table = np.load(str(given)) if isinstance(given, (str, Path)) else as_array(given)
    if table.ndim != 3:
        raise Error(f"prompt_table has the shape {list(table.shape)}; expected [tasks, tokens, H]")
    flat = table.reshape(-1, table.shape[-1])
    return {"prompt_embedding_table": flat, "prompt_vocab_size": np.array([table.shape[1]])}


ModelRunnerCpp = ModelRunner
