"""Adapters (LoRA): accepted where there are none, as scripts write it; else refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..api import api
from .attention_params import Fields
from .linear import refuse_lora


@api("layers.lora.LoraParams")
class LoraParams(Fields):
    """The adapters of the layers, of which there are none: every list is None or empty."""

    path = "layers.lora.LoraParams"

    def check(self) -> None:
        refuse_lora(self)

    def is_off(self) -> bool:
        """Whether there is no adapter."""
        lists = [value for name, value in vars(self).items() if name.startswith("lora_")]
        return not any(any(each or ()) for each in lists)

    def get_layer_params(self, layer_idx: int) -> LoraParams:
        """Those of a layer."""
        return self

    def get_runtime_params(self, layer_idx: int, lora_module: str) -> None:
        """None: the module has no adapter."""


@api("runtime.lora_manager.LoraConfig")
@api("lora_manager.LoraBuildConfig")
@api("lora_manager.LoraConfig")
@dataclass
class LoraConfig:
    """The adapters of a build: none, in no folder. `is_valid` is whether there are any."""

    hf_lora_dir: str | None = None
    adapter_config: Any = None
    tokenizer_config: Any = None
    lora_target_modules: list[str] = field(default_factory=list[str])
    is_valid: bool = False
    has_tokenizer: bool = False
    lm_head_weight: Any = None
    embedding_weight: Any = None
    hf_modules_to_trtllm_modules: dict[str, str] = field(default_factory=dict[str, str])
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict[str, str])
    lora_dir: list[str] = field(default_factory=list[str])
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    vocab_size: int = field(default=0, init=False)
    hidden_size: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        refuse_lora(self.hf_lora_dir, self.lora_dir or None, self.lora_target_modules or None)

    @classmethod
    def from_hf(
        cls,
        hf_lora_dir: str | None,
        hf_modules_to_trtllm_modules: dict[str, str] | None = None,
        trtllm_modules_to_hf_modules: dict[str, str] | None = None,
    ) -> LoraConfig:
        """The config of a folder of adapters, or of None."""
        return cls(hf_lora_dir)
