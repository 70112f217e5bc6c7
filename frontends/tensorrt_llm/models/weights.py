"""Weights of models from checkpoint folders of either form, and rank files written from models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from ....errors import Error, did_you_mean
from ....ir.core import Module as IrcModule
from ....weights import Cast, Ref
from ....weights.checkpoint import Reader
from ...arrays import ArrayFile
from ...checkpoints import meta
from ...checkpoints.mixed_gemm import is_interleaved
from ...checkpoints.ranks import RankShards, RankTensors
from ...checkpoints.tensorrt_llm import is_unread, layout_of
from ...huggingface.config import checkpoint_dtype, model_of, read_config
from ...huggingface.files import Checkpoint
from ...huggingface.quantized.parts import FLOATS, Part, Tensors
from ...models.decoder import DecoderConfig
from ..api import api
from ..context import current_session
from ..dtypes import as_array, irc_dtype, numpy_to_torch, str_dtype
from ..errors import ScriptError
from ..functional.quantized import PackedWeight
from ..layers.quantized import WeightOnly
from ..mapping import Mapping as RankMapping
from ..module import Parameter

Array = np.ndarray[Any, Any]
Source = Any  # a folder, a model of transformers, or its config
_BY_WEIGHTS = (None, "NO_QUANT", "W8A16", "W4A16", "FP8_PER_CHANNEL_PER_TOKEN")
# Keys of LLaMAConfig that irc's families have as well.
_SAME = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_size
    hidden_act max_position_embeddings mlp_bias
"""
# The fields of DecoderConfig in which models of the class LLaMAForCausalLM differ.
_LLAMA = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings norm_eps rope qkv_bias
    output_bias mlp_bias tie_word_embeddings
"""

# -- parameters


def _bind(model: Any, tensors: Tensors) -> None:
    """Bind every parameter to its tensor in the file of a rank, or to the rank's shard of one of
    transformers, whose weights quantized layers encode."""
    layers, floats = dict(model.named_modules()), dict[Any, Part]()
    for name, parameter in model.named_parameters():
        path, _, end = name.rpartition(".")
        layer, kind = layers[path], parameter.type.dtype
        if isinstance(layer, WeightOnly) and end != "bias":
            if isinstance(tensors, RankShards):
                floats[layer] = tensors.take(f"{path}.weight", *FLOATS)
            else:
                parameter.value = _of_weight_only(tensors, path, layer.bits, end)
        elif name in tensors:
            part = tensors.take(name, *(FLOATS if kind in FLOATS else (kind,)))
            if part.shape != parameter.shape:
                raise ScriptError(
                    f"{name} is {list(part.shape)} in the checkpoint, but the model expects "
                    f"{list(parameter.shape)}; give the mapping of the checkpoint's config.json"
                )
            parameter.value = _cast(part, kind)
        elif isinstance(tensors, RankShards) and "kv_" in end:
            parameter.value = np.ones(parameter.shape, np.float32)
        else:
            near = did_you_mean(name, tensors.checkpoint)
            raise ScriptError(f"{tensors.checkpoint.folder} lacks {name}{near}")
    read = _reader(model)
    for layer, part in floats.items():
        layer.load(read(_cast(part, irc_dtype(layer.dtype))))


def _cast(part: Part, dtype: str) -> Ref:
    return part.ref if part.dtype == dtype else part.ref.then(Cast(dtype))


def load_rank(
    model: Any,
    folder: str | os.PathLike[str],
    rank: int,
    hook: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Bind every parameter to its tensor in the file of a rank of a TensorRT-LLM checkpoint.

    `hook` gets the tensors of the file by name, as arrays of PyTorch, and returns those to load.
    """
    path = Path(folder) / f"rank{rank}.safetensors"
    tensors = RankTensors(path.parent, rank, current_session().add_file(f"rank{rank}", path))
    keys = list(tensors.checkpoint)
    if hook is not None:
        model.load(hook({key: numpy_to_torch(tensors.read(key).copy()) for key in keys}))
        return
    _bind(model, tensors)
    unused = [key for key in keys if key not in tensors.used and not is_unread(key)]
    if unused:
        warnings.warn(f"the model does not use {', '.join(unused)} of {path}", stacklevel=3)


def bind_llama(model: Any, source: Source) -> None:
    """Bind every parameter of a LLaMA to references of a checkpoint of transformers, of which each
    rank reads its shard."""
    checkpoint, config, session = Checkpoint(_folder_of(source)), model.config, current_session()

    def file_of(key: str) -> str:
        return session.add_file("ckpt", checkpoint.folder / checkpoint.file(key))

    layers = config.mapping.pp_layers(config.num_hidden_layers)
    _bind(model, RankShards(checkpoint, file_of, layout_of(config.to_dict()), layers))


def _of_weight_only(tensors: Tensors, path: str, bits: int, end: str) -> Array:
    """The codes or the scales of a weight-only layer."""
    is_scaled = f"{path}.per_channel_scale" in tensors
    array: Any = tensors.read(f"{path}.{end}") if is_scaled else None
    is_weight = array is not None and end == "weight"
    if array is None or (is_weight and (array.dtype != np.int8 or is_interleaved(array, bits))):
        raise ScriptError(
            f"{path}.weight has codes in the order that a kernel reads, or other scales than "
            "per_channel_scale; give irc build the folder, or compile the original checkpoint with "
            "irc compile --quantize"
        )
    return array


def arrays_of(model: Any) -> Iterator[tuple[str, Array]]:
    """(name, array) of every parameter on this rank."""
    missing = [name for name, parameter in model.named_parameters() if parameter.bound is None]
    if missing:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ScriptError(f"parameters without values cannot be saved: {listed}")
    read = _reader(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter.bound, Ref) and isinstance(parameter, PackedWeight):
            parameter.bound = read(parameter.bound)
        value = parameter.bound
        yield name, read(value) if isinstance(value, Ref) else parameter.raw_value


def _reader(model: Any) -> Callable[[Ref], Array]:
    """Reads what references to files of the session are on the rank of a model."""
    mapping: RankMapping = model.config.mapping
    module = IrcModule("weights", mapping.mesh)
    module.files = {name: str(path) for name, path in current_session().files.items()}
    return partial(Reader(module).read, rank=mapping.rank)


# -- checkpoints of transformers


def read_llama(source: Source, dtype: Any = "auto") -> dict[str, Any]:
    """The keywords of LLaMAConfig for a folder, a model or a config of transformers, as irc's
    families read it. "auto" is the dtype of the weights, float16 for those of f32."""
    config = _config_of(source)
    sizes = model_of(config).config
    rope = getattr(sizes, "rope", None)
    if rope is None or sizes != _like_llama(sizes):
        raise ScriptError(
            f"{config.get('architectures')} computes otherwise than LLaMAForCausalLM; compile the "
            "folder itself with irc compile"
        )
    settings: dict[str, Any] = config.get("rope_parameters") or {}
    stretched = settings if settings.get("rope_type", "default") != "default" else None
    return {name: getattr(sizes, name) for name in _SAME.split()} | {
        "architecture": (config.get("architectures") or ["LlamaForCausalLM"])[0],
        "dtype": infer_dtype(dtype, checkpoint_dtype(config)),
        "num_key_value_heads": sizes.kv_heads,
        "norm_epsilon": sizes.norm_eps,
        "rotary_base": rope.theta,
        "rotary_scaling": config.get("rope_scaling") or stretched,
        "attn_bias": sizes.qkv_bias,
        "dense_bias": sizes.output_bias,
    }


def _like_llama(sizes: Any) -> Any:
    """A Llama of the same sizes; None for sizes of another kind of model."""
    names = _LLAMA.split()
    if not all(hasattr(sizes, name) for name in names):
        return None
    return DecoderConfig(**{name: getattr(sizes, name) for name in names})


def read_meta(folder: str | os.PathLike[str], dtype: Any = "auto") -> dict[str, Any]:
    """The keywords of LLaMAConfig for a folder of Meta, whose weights are bfloat16."""
    return meta.config(folder) | {"dtype": infer_dtype(dtype, "bfloat16")}


def _config_of(source: Source) -> dict[str, Any]:
    """The config.json of a folder, or what a model or config of transformers would write there."""
    if isinstance(source, (str, os.PathLike)):
        return read_config(cast("str", source))
    config = getattr(source, "config", source)
    if not hasattr(config, "to_dict"):
        raise ScriptError(
            "expected the folder of a checkpoint, a model of transformers or its config, found an "
            f"object of {type(source).__name__}"
        )
    return cast("dict[str, Any]", config.to_dict())


def _folder_of(source: Source) -> Path:
    """The folder of a checkpoint; a model of transformers is written to one of the session."""
    if isinstance(source, (str, os.PathLike)):
        return Path(cast("str", source))
    tensors: dict[str, Any] = source.state_dict()
    key = tuple((name, tensor.data_ptr(), tensor._version) for name, tensor in tensors.items())
    return _written(key, lambda: tensors)


def meta_folder(folder: str | os.PathLike[str], config: Any) -> Path:
    """The tensors of a folder of Meta under the names of transformers, in one of the session."""
    key, sizes = str(Path(folder).absolute()), (config.head_size, config.vocab_size)
    return _written(key, lambda: meta.tensors(folder, *sizes))


def _written(key: Any, tensors: Callable[[], dict[str, Any]]) -> Path:
    """A folder of the session with tensors as model.safetensors, written once per key."""
    session = current_session()
    with session.lock:  # ranks may be converted by several threads
        if key not in session.copies:
            folder = session.copies[key] = session.folder / f"model-{len(session.copies)}"
            folder.mkdir()
            arrays = {name: as_array(tensor) for name, tensor in tensors().items()}
            _write(folder / "model.safetensors", arrays.items())
        return session.copies[key]


def _write(path: Path, arrays: Iterable[tuple[str, Array]]) -> None:
    """Write arrays as a file of safetensors."""
    file = ArrayFile(path.parent, path.stem)
    file.path = path
    for name, array in arrays:
        file.add(name, array)
    file.write(IrcModule("weights"))


# -- methods of models


class CheckpointMixin:
    """What models do with TensorRT-LLM checkpoint folders."""

    config_class: ClassVar[Any]
    config: Any
    named_parameters: Any

    @classmethod
    def from_checkpoint(
        cls,
        ckpt_dir: str | os.PathLike[str],
        rank: int | None = None,
        config: Any = None,
        preprocess_weights_hook: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Any:
        """The model of one rank of a checkpoint folder in TensorRT-LLM's form."""
        config = config or cls.config_class.from_checkpoint(ckpt_dir)
        if rank is not None:
            config.set_rank(rank)
        model = cast("Any", cls).from_config(config)
        load_rank(model, ckpt_dir, config.mapping.rank, preprocess_weights_hook)
        return model

    def load(self, weights: Mapping[str, Any]) -> None:
        """Set parameters by name; an Error lists those that are missing.

        A head that is missing has the embedding table.
        """
        own: dict[str, Parameter] = dict(self.named_parameters())
        given, table = dict(weights), "transformer.vocab_embedding.weight"
        if "lm_head.weight" in own and "lm_head.weight" not in given and table in given:
            given["lm_head.weight"] = given[table]
        missing = [n for n in own if n not in given and own[n].bound is None]
        unknown = [name for name in given if name not in own]
        if missing:
            listed = "\n".join(f"  {name}{did_you_mean(name, unknown)}" for name in missing)
            raise Error(f"expected a weight for every parameter, found none for\n{listed}")
        for name in own.keys() & given.keys():
            own[name].value = given[name]

    def save_checkpoint(self, output_dir: str | os.PathLike[str], save_config: bool = True) -> None:
        """Write rankN.safetensors with every parameter and, unless told not to, config.json."""
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"rank{self.config.mapping.rank}.safetensors", arrays_of(self))
        if save_config:
            self.config.to_json_file(folder / "config.json")


class LlamaCheckpointMixin:
    """How LLaMA reads checkpoints of other forms."""

    config_class: ClassVar[Any]

    @classmethod
    def from_hugging_face(
        cls,
        hf_model_or_dir: Source = None,
        dtype: Any = "auto",
        skip_loading_weights: bool = False,
        override_fields: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """The model of a checkpoint folder of transformers, or of a model in memory.

        Other `fields` are keywords of LLaMAConfig. Weights refer to the folder's files; those of
        weight-only layers become codes.
        """
        others = [fields.pop(name, None) for name in ("preloaded_model", "hf_model_dir")]
        source = next((other for other in others if other is not None), hf_model_or_dir)
        algorithms = [fields.pop(name, None) for name in ("quant_config", "quantization")]
        quant_config = algorithms[0] or algorithms[1]
        if quant_config is not None:
            _check_calibration(quant_config)
        fields |= {k: v for k, v in (override_fields or {}).items() if k != "moe_tp_mode"}
        config = cls.config_class.from_hugging_face(
            source, dtype, quant_config=quant_config, **fields
        )
        model: Any = cast("Any", cls)(config)
        if not skip_loading_weights:
            bind_llama(model, source)
        return model

    @classmethod
    def from_meta_ckpt(
        cls, meta_ckpt_dir: str | os.PathLike[str], dtype: Any = "auto", **fields: Any
    ) -> Any:
        """The model of a folder of Meta: params.json and consolidated.*.pth."""
        config = cls.config_class.from_meta_ckpt(meta_ckpt_dir, dtype, **fields)
        model: Any = cast("Any", cls)(config)
        bind_llama(model, meta_folder(meta_ckpt_dir, config))
        return model

    @classmethod
    def quantize(
        cls,
        hf_model_dir: Source,
        output_dir: str | os.PathLike[str],
        mapping: RankMapping | None = None,
        **fields: Any,
    ) -> None:
        """Write the checkpoint folder of all ranks, quantized where that needs no data."""
        world = mapping or RankMapping()
        for rank in range(world.world_size):
            own = RankMapping.from_dict({**world.to_dict(), "rank": rank})
            model = cls.from_hugging_face(hf_model_dir=hf_model_dir, mapping=own, **fields)
            model.save_checkpoint(output_dir, save_config=rank == 0)


def _check_calibration(quant_config: Any) -> None:
    """An Error where scales of inputs or caches come from running the model on data."""
    algorithm, cache = quant_config.quant_algo, quant_config.kv_cache_quant_algo
    if algorithm in _BY_WEIGHTS and cache != "INT8":
        return
    scheme = quant_config.scheme()
    options = "" if scheme is None else f" --quantize {scheme}"
    options += "" if cache is None else " --kv-cache int8"
    raise ScriptError(
        f"{algorithm or cache} needs a calibration with data, which scripts do not run; give the "
        f"folder of transformers to irc compile FOLDER{options} --calibration PATH"
    )


# -- the functions that convert_checkpoint.py imports


@api("models.convert_utils.infer_dtype")
def infer_dtype(dtype: str, source_dtype: Any = None) -> str:
    """The dtype of a build: "auto" is that of the source, float16 for float32 or none."""
    if dtype != "auto":
        short = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
        return str_dtype(short.get(dtype, dtype))
    inferred = "float16" if source_dtype is None else str_dtype(source_dtype)
    return "float16" if inferred == "float32" else inferred


@api("models.convert_utils.has_safetensors")
def has_safetensors(model_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder has files of safetensors."""
    return any(Path(model_dir).glob("*.safetensors"))


@api("models.llama.convert.load_hf_llama")
def load_hf_llama(model_dir: str) -> str:
    """The folder itself, which `from_hugging_face` and `load_weights_from_hf_model` read."""
    return model_dir
