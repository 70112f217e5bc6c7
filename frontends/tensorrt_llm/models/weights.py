"""Weights of LLaMA models as references to checkpoint folders, of either form."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from ....errors import Error, did_you_mean
from ....source import here
from ....weights import Cast, ConcatRef, FileRef, Ref, Shard, Slice, Transpose
from ...checkpoints.ranks import PLACES, RankFile
from ...checkpoints.tensorrt_llm import is_unread, transformers_model
from ...huggingface.config import checkpoint_dtype, model_of, read_config
from ...huggingface.files import Checkpoint
from ...huggingface.quantized.modelopt import pairs_of_rows
from ...huggingface.quantized.parts import FLOATS, Tensors
from ...models.decoder import DecoderConfig
from ..context import current_session
from ..dtypes import str_dtype
from ..layers.quantized import QuantizedLinear
from ..mapping import Mapping
from ..module import Parameter


def load_rank(model: Any, folder: str | os.PathLike[str], rank: int) -> None:
    """Bind every parameter to its tensor in the file of a rank of a TensorRT-LLM checkpoint."""
    file = RankFile(Path(folder), rank)
    title = Path(folder) / file.name
    alias = current_session().add_file(f"rank{rank}", title)
    tensors, layers = Tensors(file, lambda _: alias), dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, end = name.rpartition(".")
        layer = layers[path]
        if isinstance(layer, QuantizedLinear) and end != "bias":
            parameter.value = _of_quantized(tensors, path, layer, end)
            continue
        if name not in file:
            raise Error(f"{title} lacks {name}{did_you_mean(name, file)}", loc=here())
        kind = parameter.type.dtype
        found = tensors.take(name, *(FLOATS if kind in FLOATS else (kind,)))
        _check(name, found.shape, parameter)
        parameter.value = found.ref if found.dtype == kind else found.ref.then(Cast(kind))
    unused = [key for key in file if key not in tensors.used and not is_unread(key)]
    if unused:
        warnings.warn(f"the model does not use {', '.join(unused)} of {title}", stacklevel=3)


def _of_quantized(tensors: Tensors, path: str, layer: QuantizedLinear, end: str) -> Ref:
    """A parameter of a quantized layer, from the codes and scales of ModelOpt."""
    how, parameter, key = layer.recipe, getattr(layer, end), f"{path}.{end}"
    exported = "per_channel_scale" not in how.scales or how.inputs == "token"
    if (not exported and f"{path}.per_channel_scale" in tensors) or how.zero:
        raise Error(
            f"{path}.weight has codes in the order that a kernel reads; compile the original "
            "checkpoint with irc compile --quantize",
            loc=here(),
        )
    if end == "weight" and how.format == "int4":
        return pairs_of_rows(tensors, key, parameter.shape).ref
    if end == "weight":
        return tensors.view(key, parameter.type.dtype, parameter.shape).ref
    if end == how.scales and not exported:
        key = f"{path}.weights_scaling_factor"
    kind, shape = tensors.info(key).dtype, parameter.shape
    if end != how.scales or not how.group:
        found = tensors.view(key, kind, shape).ref
    else:
        found = tensors.view(key, kind, shape[::-1]).ref.then(Transpose((1, 0)))
    return found if kind == "f32" else found.then(Cast("f32"))


def _check(name: str, shape: Any, parameter: Parameter) -> None:
    if tuple(shape) != parameter.shape:
        raise Error(
            f"{name} is {list(shape)} in the checkpoint, but the model expects "
            f"{list(parameter.shape)}; give the mapping of the checkpoint's config.json",
            loc=here(),
        )


def check_keys(folder: str | os.PathLike[str]) -> None:
    """An Error where config.json of a TensorRT-LLM checkpoint asks for more than LLaMA computes."""
    try:
        sizes = transformers_model(read_config(folder)).config
    except Error as error:
        error.add_note(
            "a script whose model honours such keys gives from_checkpoint its config: "
            "config=LLaMAConfig.from_checkpoint(DIR)"
        )
        raise
    _check_layers(sizes, folder)


def _check_layers(sizes: DecoderConfig, folder: Any, known: bool = True) -> None:
    if known and not sizes.sliding_window and not sizes.qk_norm:
        return
    raise Error(
        f"{folder} is a model with experts, windows or norms of heads that LLaMAForCausalLM does "
        "not have; compile the folder itself with irc compile",
        loc=here(),
    )


# -- Hugging Face


def read_llama(folder: str | os.PathLike[str], dtype: Any = "auto") -> dict[str, Any]:
    """The keywords of LLaMAConfig for the config.json of a folder, read by irc's families."""
    config = read_config(folder)
    sizes = model_of(config).config
    _check_layers(sizes, folder, type(sizes) is DecoderConfig)
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    stretched = rope if rope.get("rope_type", "default") != "default" else None
    return {
        "architecture": (config.get("architectures") or ["LlamaForCausalLM"])[0],
        "dtype": str_dtype(checkpoint_dtype(config) if dtype == "auto" else dtype),
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_size": sizes.head_size,
        "hidden_act": sizes.hidden_act,
        "max_position_embeddings": sizes.max_position_embeddings,
        "norm_epsilon": sizes.rms_norm_eps,
        "rotary_base": sizes.rope.theta,
        "rotary_scaling": config.get("rope_scaling") or stretched,
        "attn_bias": sizes.qkv_bias,
        "dense_bias": sizes.output_bias,
        "mlp_bias": sizes.mlp_bias,
    }


def bind_llama(model: Any, folder: str | os.PathLike[str]) -> None:
    """Bind every parameter of a LLaMA to references of a Hugging Face checkpoint, of which each
    rank reads its shard."""
    source = _Source(Checkpoint(folder), model.config)
    for name, parameter in model.named_parameters():
        source.dtype = parameter.type.dtype
        parameter.value = source.of(name)


class _Source:
    """The references of parameters in one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, config: Any) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.mapping: Mapping = config.mapping
        self.dtype = ""  # of the parameter that is bound
        self._layers = self.mapping.pp_layers(config.num_hidden_layers)

    def of(self, name: str) -> Ref:
        """The reference of a parameter, on this rank."""
        module, _, kind = name.rpartition(".")
        scope = ""
        if module.startswith("transformer.layers."):
            _, _, index, module = module.split(".", 3)
            scope = f"model.layers.{self._layers[int(index)]}."
        if module not in PLACES:
            raise Error(f"no tensor of a LLaMA checkpoint belongs to {name}", loc=here())
        names, dim = PLACES[module]
        if module == "lm_head" and "lm_head.weight" not in self.checkpoint:
            names = ("model.embed_tokens",)
        if module == "transformer.vocab_embedding" and self.config.use_parallel_embedding:
            dim = self.config.embedding_sharding_dim
        if dim == 1 and kind == "bias":
            dim = None
        parts = [self._part(f"{scope}{each}.{kind}", dim) for each in names]
        return ConcatRef(tuple(parts), 0) if len(parts) > 1 else parts[0]

    def _ref(self, key: str) -> Ref:
        if key not in self.checkpoint:
            guess = did_you_mean(key, self.checkpoint)
            raise Error(f"{self.checkpoint.folder} lacks the tensor {key}{guess}", loc=here())
        path = self.checkpoint.folder / self.checkpoint.file(key)
        found: Ref = FileRef(current_session().add_file("ckpt", path), key)
        stored = self.checkpoint.tensor(key).dtype
        if stored not in FLOATS:
            raise Error(
                f"{key} is {stored}, and LLaMAForCausalLM reads floats; compile the folder itself "
                "with irc compile, which reads quantized ones",
                loc=here(),
            )
        return found if stored == self.dtype else found.then(Cast(self.dtype))

    def _part(self, key: str, dim: int | None) -> Ref:
        """This rank's shard; of fewer key-value heads than ranks each several times."""
        tp, found = self.mapping.tp_size, self._ref(key)
        if tp == 1 or dim is None:
            return found
        kv = self.config.num_key_value_heads
        if (".k_proj." in key or ".v_proj." in key) and kv % tp:
            found = self._repeated(found, self.checkpoint.tensor(key).shape, kv)
        return found.then(Shard(dim, ("tp",)))

    def _repeated(self, ref: Ref, shape: Any, heads: int) -> Ref:
        """Every key-value head as often as its query heads are spread over ranks."""
        tp = self.mapping.tp_size
        if tp % heads:
            raise Error(
                f"{heads} key-value heads cannot be shared by tp_size={tp} ranks; choose a "
                "multiple or a divisor",
                loc=here(),
            )
        size, rest = shape[0] // heads, (None,) * (len(shape) - 1)
        each = [ref.then(Slice(((i * size, (i + 1) * size), *rest))) for i in range(heads)]
        return ConcatRef(tuple(part for part in each for _ in range(tp // heads)), 0)
