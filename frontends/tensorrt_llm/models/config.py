"""`PretrainedConfig`: the sizes of a model and its mapping, as in config.json of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping as Table
from pathlib import Path
from typing import Any

from ....errors import Error
from ....source import here
from ..dtypes import str_dtype
from ..enums import PositionEmbeddingType
from ..mapping import Mapping
from ..quantization import QuantConfig, QuantMode

_NEEDED = (
    "architecture",
    "dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
)


class PretrainedConfig:
    """Sizes and options of a model; further keywords become attributes.

    Dtypes are names such as "float16". `head_size` is hidden_size / num_attention_heads by default,
    `intermediate_size` 4 * hidden_size, `num_key_value_heads` num_attention_heads.
    """

    def __init__(
        self,
        *,
        architecture: str = "",
        dtype: Any = "float32",
        hidden_size: int = 0,
        num_hidden_layers: int = 0,
        num_attention_heads: int = 0,
        vocab_size: int | None = None,
        hidden_act: str = "gelu",
        logits_dtype: Any = "float32",
        norm_epsilon: float = 1e-5,
        position_embedding_type: PositionEmbeddingType | str = "learned_absolute",
        max_position_embeddings: int | None = None,
        rotary_embedding_dim: int | None = None,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        mapping: Mapping | Table[str, Any] | None = None,
        quantization: QuantConfig | Table[str, Any] | None = None,
        use_parallel_embedding: bool = False,
        embedding_sharding_dim: int = 0,
        share_embedding_table: bool = False,
        head_size: int | None = None,
        qk_layernorm: bool = False,
        quant_mode: QuantMode | None = None,
        **more: Any,
    ) -> None:
        self.architecture = architecture
        self.dtype, self.logits_dtype = str_dtype(dtype), str_dtype(logits_dtype)
        self.vocab_size, self.hidden_size, self.hidden_act = vocab_size, hidden_size, hidden_act
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.norm_epsilon, self.qk_layernorm = norm_epsilon, qk_layernorm
        self.max_position_embeddings = max_position_embeddings
        if isinstance(position_embedding_type, str):
            position_embedding_type = PositionEmbeddingType[
                str(PositionEmbeddingType.from_string(position_embedding_type))
            ]
        self.position_embedding_type: PositionEmbeddingType = position_embedding_type
        self.head_size = head_size or hidden_size // max(1, num_attention_heads)
        self.rotary_embedding_dim = rotary_embedding_dim or self.head_size
        self.use_parallel_embedding = use_parallel_embedding
        self.embedding_sharding_dim = embedding_sharding_dim
        self.share_embedding_table = share_embedding_table
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping or {})
        if not isinstance(quantization, QuantConfig):
            quantization = QuantConfig.from_dict(quantization or {})
        self.quantization, self._mode = quantization, quant_mode
        vars(self).update(more)

    @property
    def quant_mode(self) -> QuantMode:
        """The flags of the quantization."""
        return self.quantization.quant_mode if self._mode is None else self._mode

    @property
    def quant_algo(self) -> Any:
        """The algorithm of the quantization, or None."""
        return self.quantization.quant_algo

    @property
    def kv_dtype(self) -> str:
        """The dtype of KV caches."""
        mode = self.quant_mode
        return (
            "int8" if mode.has_int8_kv_cache() else "fp8" if mode.has_fp8_kv_cache() else self.dtype
        )

    def input_sizes(self) -> dict[str, Any]:
        """The arguments of `prepare_basic_inputs` that the model determines."""
        return {
            "num_kv_heads": self.num_key_value_heads,
            "head_size": self.head_size,
            "num_layers": self.num_hidden_layers,
            "kv_dtype": self.kv_dtype,
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "mapping": self.mapping,
        }

    def set_rank(self, rank: int) -> None:
        """Make this the config of another rank."""
        self.mapping = Mapping.from_dict({**self.mapping.to_dict(), "rank": rank})

    @classmethod
    def from_dict(cls, config: Table[str, Any]) -> Any:
        """The config of a dict; an Error names a size that is missing."""
        for name in _NEEDED:
            if name not in config:
                raise Error(f"expected the key {name} in the config, found none", loc=here())
        return cls(**config)

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> Any:
        """The config in a JSON file."""
        from ....json_files import read_object

        return cls.from_dict(read_object(Path(path)))

    @classmethod
    def from_checkpoint(cls, folder: str | os.PathLike[str]) -> Any:
        """The config of a checkpoint folder."""
        return cls.from_json_file(Path(folder) / "config.json")

    def to_dict(self) -> dict[str, Any]:
        """Every key as JSON has it."""
        found = {name: value for name, value in vars(self).items() if name != "_mode"}
        found["position_embedding_type"] = str(self.position_embedding_type)
        found["mapping"] = self.mapping.to_dict()
        found["quantization"] = self.quantization.to_dict()
        return found

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write the config."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.architecture}, {self.num_hidden_layers} layers)"
