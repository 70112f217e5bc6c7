"""Every public name of TensorRT-LLM's API and what it is here; aliases, lint and guide read it.

A name is supported, accepted without effect (with the reason), or unsupported (with the
alternative). Names are those of versions 0.5 to 1.x, of both dialects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from ...errors import did_you_mean

Kind = Literal["supported", "without effect", "unsupported"]
ROOT = "tensorrt_llm"
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Name:
    """One public name: its module (without `tensorrt_llm.`), what it is here, and why."""

    module: str
    name: str
    kind: Kind
    why: str = ""

    @property
    def path(self) -> str:
        """The name with its module, as scripts write it."""
        return ".".join(filter(None, (ROOT, self.module, self.name)))

    def find(self) -> Any:
        """The object of irc with this name; AttributeError where there is none."""
        for home in homes(self.module):
            try:
                module = import_module(home, _PACKAGE)
            except ModuleNotFoundError as error:
                if error.name is None or not error.name.startswith("irc."):
                    raise
                continue
            if hasattr(module, self.name):
                return getattr(module, self.name)
        raise AttributeError(f"irc has no {self.path}")


# Modules of irc that hold the names of a module whose counterpart has another name, or several.
_HOMES = {
    "": ("functional", "network", "module", "builder", "mapping", "dtypes", "utilities", "tensor"),
    "_utils": ("dtypes", "utilities"),
    "_common": ("network", "utilities"),
    "functional": ("functional", "enums", "tensor"),
    "builder": ("builder", "network"),
    "module": ("module",),
    "parameter": ("module",),
    "layers": ("layers", "enums", "functional"),
    "layers.attention": ("layers", "functional", "enums"),
    "plugin": ("network",),
    "models": ("models", "quantization", "layers.quantized"),
    "models.modeling_utils": ("models.config", "models.decoder", "models", "quantization"),
    "top_model_mixin": ("models.generation_mixin",),
    "quantization": ("quantization", "layers.quantized"),
}


def homes(module: str) -> list[str]:
    """The modules of irc, relative to this package, that may hold the names of an old module."""
    found = _HOMES.get(module)
    while found is None:
        parent = module.rpartition(".")[0]
        found = (module, *_HOMES.get(parent, (parent,))) if parent else (module,)
    return [f".{name}" for name in found]


_ENUMS = (
    "AttentionMaskType PositionEmbeddingType RotaryScalingType MLPType LayerNormType "
    "LayerNormPositionType"
)
_ATTENTION = (
    "Attention BertAttention AttentionParams KeyValueCacheParams AttentionMaskParams "
    "BlockSparseAttnParams MropeParams SpecDecodingParams"
)
_FUNCTIONAL = """
    ACT2FN GATED_ACT_2_ACT AllReduceConfig AllReduceFusionOp AllReduceParams AllReduceStrategy
    RopeEmbeddingUtils Tensor abs activation add allgather allreduce arange argmax avg_pool2d
    bert_attention broadcast_helper cast categorical_sample chunk Conditional clip concat constant
    constant_to_tensor_ constants_to_tensors_ conv1d conv2d conv3d conv_transpose2d cos cumsum div
    einsum embedding eq exp expand expand_dims expand_dims_like expand_mask flatten flip floordiv
    gather gather_last_token_logits gather_nd gegelu geglu gelu generate_alibi_biases
    generate_alibi_slopes generate_logn_scaling gpt_attention group_norm gt identity index_select
    int_clip interpolate is_gated_activation layer_norm log log_softmax lt masked_scatter matmul max
    maximum mean meshgrid2d min minimum modulo mul non_gated_version not_op op_and op_or op_xor
    outer pad permute pow prod quick_gelu recv reduce reduce_scatter relu repeat repeat_interleave
    rms_norm round scatter scatter_nd select send shape sigmoid silu sin slice softmax softplus
    split sqrt squared_relu squeeze stack sub sum swiglu tanh topk transpose unbind unsqueeze view
    where
"""
_LINEAR = "Linear ColumnLinear RowLinear"
_LAYERS = f"""
    {_ENUMS} {_ATTENTION} {_LINEAR} MLP GatedMLP FusedGatedMLP MOE MoeConfig SharedMoE Embedding
    PromptTuningEmbedding LayerNorm RmsNorm GroupNorm Conv1d Conv2d Conv3d ConvTranspose2d
    AvgPool2d Mish Cast
"""
_NETWORK = "Network net_guard default_net default_trtnet precision"
_CONVERSIONS = """
    str_dtype_to_trt str_dtype_to_np str_dtype_to_torch trt_dtype_to_np trt_dtype_to_str
    trt_dtype_to_torch np_dtype_to_trt np_dtype_to_torch torch_dtype_to_trt torch_dtype_to_np
    torch_dtype_to_str torch_to_numpy numpy_to_torch numpy_to_dtype fp16_array fp32_array bf16_array
    int32_array int64_array bool_array dim_resolve_negative dim_to_trt_axes trt_axes_to_dim
    np_bfloat16 np_float8 pad_vocab_size mpi_rank mpi_world_size trt_version trt_gte to_dict
    to_json_string to_json_file release_gc
"""
_LLAMA = "LLaMADecoderLayer LLaMAModel LLaMAForCausalLM"
_CONFIGS = "PretrainedConfig PretrainedModel DecoderModelForCausalLM QuantConfig"

_SUPPORTED = {
    "": """
        Mapping Builder BuildConfig build Module Parameter Tensor constant default_net
        default_trtnet net_guard precision str_dtype_to_trt str_dtype_to_torch mpi_rank
        mpi_world_size __version__ Network logger functional layers models quantization runtime
        network mapping module parameter builder plugin profiler
    """,
    "_utils": _CONVERSIONS,
    "_common": "default_net default_trtnet precision",
    "builder": "Builder BuilderConfig BuildConfig Engine EngineConfig build",
    "functional": _ENUMS + _FUNCTIONAL,
    "layers": _LAYERS,
    "layers.activation": "Mish",
    "layers.attention": f"{_ENUMS} {_ATTENTION} RopeEmbeddingUtils compute_relative_bias "
    "make_causal_mask",
    "layers.cast": "Cast",
    "layers.conv": "Conv1d Conv2d Conv3d ConvTranspose2d",
    "layers.embedding": "Embedding PromptTuningEmbedding",
    "layers.linear": _LINEAR,
    "layers.mlp": "MLP GatedMLP FusedGatedMLP",
    "layers.moe": "MOE MixtureOfExperts MoeConfig SharedMoE",
    "layers.pooling": "AvgPool2d",
    "layers.normalization": "LayerNorm RmsNorm GroupNorm",
    "logger": "logger Logger",
    "mapping": "Mapping",
    "models": f"{_LLAMA} LLaMAConfig {_CONFIGS} quantize_model",
    "models.generation_mixin": "GenerationMixin",
    "models.llama": "",
    "models.llama.config": "LLaMAConfig",
    "models.llama.model": _LLAMA,
    "models.modeling_utils": _CONFIGS,
    "module": "Module ModuleList",
    "network": _NETWORK,
    "parameter": "Parameter",
    "plugin": "PluginConfig",
    "plugin.plugin": "PluginConfig",
    "quantization": "QuantMode QuantAlgo QUANT_ALGO_LIST KV_CACHE_QUANT_ALGO_LIST",
    "quantization.mode": "QuantMode QuantAlgo QUANT_ALGO_LIST KV_CACHE_QUANT_ALGO_LIST",
    "quantization.layers": """
        FP8Linear FP8RowLinear Fp8RowwiseFusedGatedMLP Fp8RowwiseGatedMLP Fp8RowwiseLinear
        Fp8RowwiseMLP Fp8RowwiseRowLinear Int8SmoothQuantLinear Int8SmoothQuantRowLinear
        SmoothQuantGatedMLP SmoothQuantLinear SmoothQuantMLP SmoothQuantRowLinear
        WeightOnlyGroupwiseQuantLinear WeightOnlyGroupwiseQuantRowLinear WeightOnlyQuantEmbedding
        WeightOnlyQuantLinear WeightOnlyQuantRowLinear
    """,
    "quantization.quantize": "quantize",
    "runtime": """
        GenerationSession ModelConfig ModelRunner ModelRunnerCpp SamplingConfig Session TensorInfo
        to_word_list_format PYTHON_BINDINGS
    """,
    "runtime.generation": "GenerationSession ModelConfig SamplingConfig to_word_list_format",
    "runtime.model_runner": "ModelRunner",
    "runtime.session": "Session TensorInfo",
}

_ONE_PROCESS = "one process traces and runs all ranks"
_WITHOUT_EFFECT = {
    "": {"mpi_barrier mpi_comm": _ONE_PROCESS},
    "_common": {"_init": "irc needs no initialization"},
    "_utils": {"mpi_barrier mpi_comm": _ONE_PROCESS},
    "functional": {
        "assertion": "shapes are checked while a network is traced",
        "cuda_stream_sync": "backends order their streams themselves",
    },
    "plugin": {"ContextFMHAType": "backends choose the attention kernel"},
    "plugin.plugin": {"ContextFMHAType": "backends choose the attention kernel"},
    "profiler": {
        """start stop summary elapsed_time_in_sec print_memory_usage device_memory_info
        check_gpt_mem_usage print_iteration_memory_usage host_memory_info""": (
            "irc compile reports the time of every pass, irc bench that of a run"
        )
    },
    "quantization": {"GroupwiseQuantAlgo": "the scheme of `quantize` states the group"},
}

_LORA = "merge the adapters into the checkpoint"
_SSM = "write the recurrence as an operation of your own (irc.operation)"
_SIZES = "a shape that depends on data; use a mask with where"
_PRODUCT = "use matmul; the pass quantize and the backends choose FP8 kernels"
_SPECULATIVE = "speculative decoding is not supported; compile the base model"
_DRAFT = "irc run, or irc generate with the compiled model"
_FAMILIES = "compile the Hugging Face checkpoint folder: irc compile FOLDER"
_REWRITE = "write a pass (irc.rule, irc.Pass) and name it in --pipeline"

_UNSUPPORTED = {
    "": {
        "LLM SamplingParams KvCacheConfig LlmArgs": _DRAFT,
        "AutoConfig AutoModelForCausalLM": _FAMILIES,
        "PluginBase": "declare an operation (irc.operation) and a plugin (irc plugins)",
        "math_utils tools": "use Python's own functions",
    },
    "functional": {
        "SideStreamIDType": "backends choose their streams",
        "rand": "give random numbers as an input of the network",
        "cp_split_plugin": "give Mapping a cp_size; irc shards the tokens",
        "create_allreduce_plugin": "use allreduce",
        "DimRange": "give Tensor a dim_range: an OrderedDict of names and ranges",
        "dora_plugin lora_plugin": _LORA,
        "gemm_allreduce": "use matmul and allreduce; backends fuse them",
        "gemm_swiglu low_latency_gemm low_latency_gemm_swiglu": _PRODUCT,
        "mamba_conv1d selective_scan rg_lru": _SSM,
        "masked_select nonzero": _SIZES,
        "elementwise_binary unary": "use the function of the operation, such as add or exp",
    },
    "layers": {
        "Lora LoraParams LoraRuntimeParams": _LORA,
        "Mamba Mamba2 Recurrent RgLru FusedRgLru GroupedLinear": _SSM,
        "CogVLMAttention": "use Attention with two ColumnLinear and where",
        "DeepseekV2Attention": _FAMILIES,
        "LanguageAdapter LanguageAdapterConfig": "add the adapter as layers of your own",
    },
    "models": {
        """BaichuanForCausalLM BertForQuestionAnswering BertForSequenceClassification BertModel
        BloomForCausalLM BloomModel ChatGLMConfig ChatGLMForCausalLM ChatGLMModel
        CLIPVisionTransformer CogVLMConfig CogVLMForCausalLM CohereForCausalLM DbrxConfig
        DbrxForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DecoderModel DiT EncoderModel
        FalconConfig FalconForCausalLM FalconModel GemmaConfig GemmaForCausalLM GPTConfig
        GPTForCausalLM GPTJConfig GPTJForCausalLM GPTJModel GPTLMHeadModel GPTModel
        GPTNeoXForCausalLM GPTNeoXModel InternLMForCausalLM MambaConfig MambaForCausalLM
        MLLaMAForCausalLM MPTForCausalLM MPTModel OPTForCausalLM OPTModel Phi3Config Phi3ForCausalLM
        Phi3Model PhiConfig PhiForCausalLM PhiModel QWenConfig QWenForCausalLM QWenModel
        RecurrentGemmaForCausalLM RobertaModel SkyworkForCausalLM WhisperEncoder""": _FAMILIES,
        """EagleForCausalLM MedusaConfig MedusaForCausalLm ReDrafterForLLaMALM ReDrafterForQWenLM
        SpeculativeDecodingMode""": _SPECULATIVE,
        "MODEL_MAP": "name the class itself",
    },
    "quantization": {
        "quantize_and_export": "irc compile --quantize SCHEME --calibration PATH",
        "utils": "irc compile --quantize SCHEME",
    },
    "quantization.layers": {
        """FP4Linear FP4RowLinear Fp8RowwiseAttention Fp8RowwiseRmsNorm Fp8RowwiseLayerNorm
        QServeW4A8ColumnLinear QServeW4A8Linear QServeW4A8RowLinear SmoothQuantAttention
        SmoothQuantLayerNorm SmoothQuantRmsNorm""": "irc compile --quantize SCHEME"
    },
    "runtime": {
        "ChatGLMGenerationSession QWenForCausalLMGenerationSession": "use GenerationSession",
        "MambaLMHeadModelGenerationSession": _SSM,
        "EncDecModelRunner MultimodalModelRunner": "run each part with runtime.Session",
        "GenerationSequence KVCacheManager": "a cache is a state of the artifact",
        "LogitsProcessor LogitsProcessorList StoppingCriteria StoppingCriteriaList": (
            "give decode any callable with the same arguments"
        ),
    },
}
# Modules of which no name is supported.
_UNSUPPORTED_MODULES = {
    "auto_parallel": "irc compile --mesh tp=N shards a model",
    "bindings": _DRAFT,
    "commands": "irc compile, irc build and irc generate",
    "evaluate": "irc quality",
    "executor": _DRAFT,
    "graph_rewriting": _REWRITE,
    "hlapi": _DRAFT,
    "llmapi": _DRAFT,
    "layers.lora": _LORA,
    "layers.recurrent": _SSM,
    "layers.ssm": _SSM,
    "lora_manager": _LORA,
    "python_plugin": "declare an operation (irc.operation) and a plugin (irc plugins)",
    "runtime.lora_manager": _LORA,
    "tools": "use the commands of irc",
}

# Keyword arguments that any function or class of the API takes without effect.
KEYWORDS = {
    "workspace": "irc allocates the workspaces of collectives",
    "all_reduce_workspace": "irc allocates the workspaces of collectives",
    "instance_id": "irc numbers collectives itself; duplicates are refused",
    "strategy": "the backend chooses the algorithm of a collective",
    "use_auto_parallel": "irc compile --mesh shards a model",
    "timing_cache": "irc keeps its timing caches itself (irc cache)",
    "input_timing_cache": "irc keeps its timing caches itself (irc cache)",
    "output_timing_cache": "irc keeps its timing caches itself (irc cache)",
    "use_fp32_acc": "products are summed in f32",
    "prefer_managed_weight": "weights stay in the checkpoint",
    "prefer_managed": "weights stay in the checkpoint",
    "pad_lda": "backends choose the layout of operands",
    "pad_ldc": "backends choose the layout of operands",
    "cuda_graph_mode": "the backend decides on graphs",
    "workers": _ONE_PROCESS,
    "gpus_per_node": "the mesh has no hosts",
}

# Methods of objects that the API returns, which a script reaches without importing a name.
_PLUGINS = "irc chooses the kernels of operations"
METHODS: dict[Kind, dict[str, str]] = {
    "supported": {
        """create_builder create_network create_builder_config build_engine prepare_inputs
        set_named_parameters save_config mark_output register_network_output named_parameters
        from_hugging_face from_checkpoint split_weights trt_network set_value_or_dummy get_parent
        to_legacy_setting replace_all_uses_with""": ""
    },
    "without effect": {
        """set_gpt_attention_plugin set_bert_attention_plugin set_gemm_plugin set_layernorm_plugin
        set_rmsnorm_plugin set_lookup_plugin set_moe_plugin set_smooth_quant_plugins
        set_weight_only_quant_matmul_plugin set_weight_only_groupwise_quant_matmul_plugin
        set_quantize_per_token_plugin set_quantize_tensor_plugin set_nccl_plugin set_context_fmha
        set_layernorm_quantization_plugin set_rmsnorm_quantization_plugin set_context_fmha_type
        enable_remove_input_padding set_qk_half_accum set_smooth_quant_gemm_plugin
        enable_paged_kv_cache enable_qk_half_accum set_identity_plugin set_fp8_rowwise_quant_plugins
        enable_mmha_multi_block_mode enable_xqa_optimization set_paged_kv_cache""": (
            "irc chooses the kernels of operations"
        ),
        "save_timing_cache": KEYWORDS["timing_cache"],
    },
    "unsupported": {
        "refit_engine": "compile again; weights stay in the checkpoint",
        "set_lora_plugin set_dora_plugin": _LORA,
        "to_dot": "irc show DIR --html FILE",
        "to_onnx": "irc compile --backend onnx writes ONNX models",
    },
}


def _rows() -> Iterator[Name]:
    supported = {module: {names: ""} for module, names in _SUPPORTED.items()}
    parts: dict[Kind, dict[str, dict[str, str]]] = {
        "supported": supported,
        "without effect": _WITHOUT_EFFECT,
        "unsupported": _UNSUPPORTED,
    }
    for kind, by_module in parts.items():
        for module, reasons in by_module.items():
            for name, why in _single(reasons):
                yield Name(module, name, kind, why)


def _single(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, why) for names, why in reasons.items() for name in names.split())


@cache
def methods() -> dict[str, tuple[Kind, str]]:
    """What each method of METHODS is, and why."""
    return {n: (kind, why) for kind, each in METHODS.items() for n, why in _single(each)}


@cache
def table() -> dict[tuple[str, str], Name]:
    """Every public name by (module, name)."""
    return {(each.module, each.name): each for each in _rows()}


@cache
def modules() -> dict[str, str]:
    """Every listed module with its alternative; "" where some of its names are supported."""
    known = {module for module, _ in table()} | set(_SUPPORTED)
    return {**dict.fromkeys(sorted(known), ""), **_UNSUPPORTED_MODULES}


def alternative(module: str) -> str | None:
    """What to use instead of a module, or the nearest unsupported one around it.

    "" where names of it are supported; None where no such module is known.
    """
    listed = modules()
    if module in listed:
        return listed[module]
    parent, _, own = module.rpartition(".")
    if parent == "models":
        return _FAMILIES if own.islower() else None
    return alternative(parent) or None if parent else None


def look_up(module: str, name: str) -> Name | None:
    """What a name is here; in an unknown part of a package, what the package says of it."""
    found = table().get((module, name))
    if found is not None:
        return found
    if why := alternative(module):
        return Name(module, name, "unsupported", why)
    parent = module.rpartition(".")[0]
    inherited = table().get((parent, name)) if parent else None
    if inherited is not None and inherited.kind == "unsupported":
        return Name(module, name, "unsupported", inherited.why)
    return None


def suggestion(module: str, name: str) -> str:
    """`; did you mean ...?` among the names of a module."""
    return did_you_mean(name, [known for where, known in table() if where == module])
