"""LLaMA of both generations, on every number of ranks, against transformers."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (the binder takes the arguments of every release)

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import irc
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import current_network, new_session
from irc.frontends.tensorrt_llm.dtypes import data_type
from irc.frontends.tensorrt_llm.functional import recv, send
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.models import decoder
from irc.frontends.tensorrt_llm.models import llama as classes
from irc.frontends.tensorrt_llm.models.config import LLaMAConfig, PretrainedConfig
from irc.frontends.tensorrt_llm.models.decoder import GenerationMixin
from irc.frontends.tensorrt_llm.module import Module
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.fresh import fresh
from tests.frontends.checkpoints.rank_folders import Conversion
from tests.frontends.checkpoints.test_quantized_ranks import folders
from tests.frontends.checkpoints.test_rank_folders import CASES as FOLDERS

from .llamas import (
    CAPACITY,
    LLAMA,
    MIXTRAL,
    ROWS,
    VOCAB,
    Llama,
    made,
    of_hugging_face,
    of_keywords,
    of_ranks,
    steps_of,
)

pytestmark = pytest.mark.oracle
ONE = Conversion()
SOURCES = {"A": of_keywords, "ranks": of_ranks, "Hugging Face": of_hugging_face}

NAMES = (
    "one rank", "fused", "shared key heads", "rope", "uneven stages", "rows of the table",
    "columns of the table", "qwen2", "tied with head", "experts by width",
)  # fmt: skip
CASES = {name: FOLDERS[name] for name in NAMES}
CASES["experts by rank"] = (MIXTRAL, Conversion(tp=2, moe_ep=2, pp=2))


def drawn(count: int, stream: int = 0) -> np.ndarray[Any, Any]:
    """Token ids [ROWS, count]."""
    return fresh(stream).integers(0, VOCAB, (ROWS, count))


def close(outputs: Any, wanted: Any) -> None:
    np.testing.assert_allclose(outputs, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


# A has one switch for all biases of attention; experts of Hugging Face are irc's own.
SKIPPED = {("A", "qwen2")} | {("Hugging Face", f"experts by {how}") for how in ("width", "rank")}


@pytest.mark.parametrize(
    ("source", "name"), [(s, n) for s in SOURCES for n in CASES if (s, n) not in SKIPPED]
)
def test_logits_of_a_prompt_and_of_single_tokens(source: str, name: str, tmp_path: Path) -> None:
    (config, how), ids = CASES[name], drawn(7)
    model = made(tmp_path, config)
    is_fused = how.fused and source != "Hugging Face"
    more: dict[str, Any] = {"use_fused_mlp": True} if is_fused else {}
    how = replace(how, fused=how.fused and source != "A")
    plugin = (list(CASES).index(name) + list(SOURCES).index(source)) % 2 == 0
    version = "0.7" if source == "A" else "0.16"
    run = steps_of(SOURCES[source](model, how, **more), how, plugin, version)
    wanted = model.states(ids)[-1]
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        close(run(ids[:, begin:end])["logits"][:, :VOCAB], wanted[:, end - 1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (MIXTRAL, "compile the folder itself"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4}, "compile the folder itself"),
        (LLAMA, "down_proj.weight is i8.*; expected f32 or f16 or bf16"),
    ],
    ids=["experts", "window", "codes"],
)
def test_folders_that_scripts_do_not_read(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, path = made(tmp_path, keys), tmp_path / "model.safetensors"
    codes = {n: x.astype(np.int8) for n, x in load_file(path).items() if "1.mlp.down_proj" in n}
    if keys is LLAMA:
        save_file(load_file(path) | codes, path)
    with pytest.raises(irc.Error, match=message):
        steps_of(of_hugging_face(model, ONE), ONE)


@pytest.mark.parametrize(
    ("name", "message"),
    {"awq": "makes no layers of ", "int8 weights": "other scales than per_"}.items(),
)
def test_quantized_folders_that_scripts_do_not_read(
    name: str, message: str, tmp_path: Path
) -> None:
    folder = folders(tmp_path, name, ONE).quantized
    with pytest.raises(irc.Error, match=message):
        steps_of(lambda _: classes.LLaMAForCausalLM.from_checkpoint(folder), ONE)


def test_quantized_layers_that_cannot_be_read(llama: Llama) -> None:
    scales = {"quantization": {"quant_algo": "W4A16"}}

    def pack(key: str, array: np.ndarray[Any, Any]) -> Any:
        more = {key.replace("weight", "per_channel_scale"): np.ones(len(array), np.float32)}
        return {key: array, **(more if ".qkv." in key else {})}

    source = of_ranks(llama, ONE, pack=pack, **scales)
    with pytest.raises(irc.Error, match=r"qkv.weight has codes in the order that a kernel reads"):
        steps_of(source, ONE)


def test_tensors_of_a_rank_that_do_not_fit(llama: Llama) -> None:
    def more(key: str, array: np.ndarray[Any, Any]) -> Any:
        bias = {key.replace("weight", "bias"): np.ones(len(array), np.float32)}
        return {key: array, **(bias if ".1.mlp.fc." in key else {})}

    with pytest.warns(UserWarning, match=r"does not use transformer.layers.1.mlp.fc.bias of .*ran"):
        steps_of(of_ranks(llama, ONE, pack=more), ONE)
    source = of_ranks(llama, ONE, pack=lambda key, x: {key: x.astype(np.int32)})
    with pytest.raises(irc.Error, match=r"is i32\[\d+, 24\]; expected f32 or f16 or bf16"):
        steps_of(source, ONE)


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_inputs_and_outputs_of_every_stage(version: Any, plugin: bool, llama: Llama) -> None:
    how, networks = Conversion(tp=2, pp=2), list[Network]()
    source = of_keywords(llama, how) if version == "0.7" else of_hugging_face(llama, how)

    def noted(mapping: Mapping) -> Any:
        networks.append(current_network())
        return source(mapping)

    run = steps_of(noted, how, plugin, version)
    first, last = (set(network.inputs) for network in (networks[0], networks[2]))
    lengths = {"sequence_length", "host_past_key_value_lengths", "cache_indirection"}
    both = {"position_ids", *(lengths if plugin else ["attention_mask"])}
    assert first >= both | {"input_ids", "past_key_value_0", "past_key_value_1"}
    assert last >= both | {"hidden_states_input", "last_token_ids", "past_key_value_2"}
    assert not first & {"hidden_states_input", "last_token_ids", "past_key_value_2"}
    assert "hidden_states_output" in networks[0].outputs
    assert set(networks[2].outputs) == {"logits", "present_key_value_2"}
    ranges = {"batch_size_beam_width": (1, 2, 2), "input_len": (1, 8, 16)}
    ranges["max_seq_len" if plugin else "past_key_len"] = (int(plugin), CAPACITY, CAPACITY)
    assert ranges.items() <= dict(run.module.dims).items()


def test_an_old_layer_needs_no_mapping() -> None:
    with new_session("0.7"):
        old: Any = classes.LLaMADecoderLayerOfKeywords
        layer = old(0, 24, 4, tp_group=[0, 1], tp_size=2, tp_rank=1)
        assert layer.attention.qkv.weight.shape == (36, 24)
        assert layer.config.mapping.rank == 1


def test_load_names_what_is_missing(llama: Llama) -> None:
    model = classes.LLaMAForCausalLM.from_config(LLaMAConfig.from_hugging_face(llama.folder))
    weights = {name: np.zeros(p.shape, np.float32) for name, p in model.named_parameters()}
    weights["transformer.ln_f.weights"] = weights.pop("transformer.ln_f.weight")
    message = r"none for\n  transformer.ln_f.weight; did you mean 'transformer.ln_f.weights'"
    with pytest.raises(irc.Error, match=message):
        model.load(weights)
    weights["transformer.ln_f.weight"] = weights.pop("transformer.ln_f.weights")
    model.load(weights)
    assert all(parameter.bound is not None for parameter in model.parameters())


SIZES: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "dtype": "float32", "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {  # part of the message -> keys
    "has no key 'rotray_base'; did you mean 'rotary_base'": {"rotray_base": 1e6},
    "sliding_window=4: expected None": {"sliding_window": 4},
    "clip_qkv=8.0: expected None": {"clip_qkv": 8.0},
    "qk_layernorm=True: expected False": {"qk_layernorm": True},
    "rotary_pct=0.5": {"rotary_pct": 0.5},
    "expected 8, the size of a head": {"rotary_embedding_dim": 4},
    "attn_logit_softcapping=30.0": {"attn_logit_softcapping": 30.0},
    "embedding_multiplier=12.0: expected 1.0": {"embedding_multiplier": 12.0},
    "residual_mlp=True: expected False": {"residual_mlp": True},
}


@pytest.mark.parametrize("message", KEYS)
def test_keys_that_llama_does_not_compute(message: str) -> None:
    keys = KEYS[message]
    with pytest.raises(irc.Error, match=message):
        LLaMAConfig(**SIZES, **keys)
    own = PretrainedConfig(**{**SIZES, "architecture": "Own"}, **keys)
    assert vars(own).items() >= keys.items()  # for models of scripts
    with pytest.raises(irc.Error, match=message):
        classes.LLaMAForCausalLM(own)


def test_keys_of_older_configs() -> None:
    config = LLaMAConfig(**SIZES, moe_num_experts=4, moe_top_k=2, hidden_act="swiglu")
    assert (config.moe.num_experts, config.moe.top_k) == (4, 2)
    assert LLaMAConfig(**SIZES, moe_config=config.moe, hidden_act="swiglu").moe is config.moe
    written = {*LLaMAConfig(**SIZES).to_dict()}
    assert not written & {"max_lora_rank", "quant_kwargs", "use_prompt_tuning", "world_size"}
    config.set_if_not_exist("mlp_bias", True)
    config.set_if_not_exist("own", 1)
    assert (config.mlp_bias, config.own) == (False, 1)
    ranks = LLaMAConfig(**SIZES, world_size=4, tp_size=2, pp_size=2).for_each_rank()
    assert [config.mapping.rank for config in ranks] == [0, 1, 2, 3]
    del (sizes := dict(SIZES))["vocab_size"]
    assert isinstance(PretrainedConfig.from_dict(sizes), LLaMAConfig)


SOURCES_OF_GPT = """
from .modeling_utils import DecoderModelForCausalLM, PretrainedConfig
class GPTConfig(PretrainedConfig):
    def __init__(self, *, embedding_scale=None, **keys):
        self.embedding_scale = embedding_scale
        super().__init__(**keys)
class GPTForCausalLM(DecoderModelForCausalLM):
    config_class = GPTConfig
"""


def test_configs_of_models_in_the_sources(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(SOURCES_OF_GPT)
    with new_session("0.16", sources=tmp_path), aliases():
        config = PretrainedConfig.from_dict(SIZES | {"architecture": "GPTForCausalLM"})
        assert (type(config).__name__, config.embedding_scale) == ("GPTConfig", None)
        assert config.to_dict()["embedding_scale"] is None
        for name in ("OtherForCausalLM", "BloomForCausalLM"):
            other = PretrainedConfig.from_dict(SIZES | {"architecture": name})
            assert type(other) is PretrainedConfig
    assert isinstance(PretrainedConfig.from_dict(SIZES), LLaMAConfig)


# What loaders of weights read, by the class and the generation (0.5 to 0.7.1: A).
ATTRIBUTES = {
    ("0.7", "LLaMADecoderLayer"): """
        attention attention_mask_type dtype hidden_act hidden_size input_layernorm
        max_position_embeddings mlp mlp_hidden_size num_attention_heads num_kv_heads
        position_embedding_type post_layernorm tp_group tp_size""",
    ("0.7", "LLaMAModel"): "layers ln_f mapping use_prompt_tuning vocab_embedding",
    ("0.7", "LLaMAForCausalLM"): """
        dtype embedding_sharding_dim hidden_size kv_dtype lm_head logits_dtype moe_config num_heads
        num_kv_heads num_layers quant_mode tp_size use_parallel_embedding vocab_size mapping""",
    ("0.16", "LLaMADecoderLayer"): """
        attention config has_residual_mlp input_layernorm is_last_local_layer layer_idx
        local_layer_idx mapping mlp post_layernorm""",
    ("0.16", "LLaMAModel"): "hidden_size layers ln_f mapping vocab_embedding",
    ("0.16", "LLaMAForCausalLM"): """
        config lm_head mapping mup_width_multiplier position_embedding_type quant_mode transformer
        """,
}


@pytest.mark.parametrize(("version", "name"), ATTRIBUTES)
def test_attributes_that_loaders_read(version: Any, name: str) -> None:
    with new_session(version), aliases():
        cls = getattr(import_module("tensorrt_llm.models.llama.model"), name)
        assert cls is getattr(import_module("tensorrt_llm.models"), name)
        if version == "0.16":
            config = LLaMAConfig(**SIZES)
            model = cls(config, 1) if "Layer" in name else cls(config)
        elif "Layer" in name:
            model = cls(0, 16, 2)
        else:
            model = cls(2, 2, -1, 16, 32, "silu", 64, "float16")
            assert model.config.num_key_value_heads == 2
        for attribute in ATTRIBUTES[version, name].split():
            getattr(model, attribute)
        if (version, name) == ("0.7", "LLaMAForCausalLM"):
            assert model.get_transformer_layers(model.mapping, 2) == [0, 1]
            assert (str(model.dtype), model.num_kv_heads) == (str(data_type("f16")), 2)
            tuned = cls(2, 2, 2, 16, 32, "silu", 64, "float16", use_prompt_tuning=True)
            assert isinstance(tuned.vocab_embedding, layers.PromptTuningEmbedding)
            with pytest.raises(irc.Error, match="'rms_norm_epsilon'; did you mean 'rms_norm_eps'"):
                cls(2, 2, 2, 16, 32, "silu", 64, "float16", rms_norm_epsilon=1e-3)


class OwnTransformer(Module):
    """A transformer as TensorRT-LLM's models are written: it receives and sends itself."""

    def __init__(self, config: Any) -> None:
        self.mapping = config.mapping
        if self.mapping.is_first_pp_rank():
            self.vocab_embedding = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = decoder.DecoderLayerList(classes.LLaMADecoderLayer, config)
        if self.mapping.is_last_pp_rank():
            self.ln_f = layers.RmsNorm(config.hidden_size, eps=config.norm_epsilon)

    def forward(
        self, input_ids: Any, position_ids: Any, kv_cache_params: Any, hidden_states: Any = None,
        **inputs: Any,
    ) -> Any:  # fmt: skip
        kv_cache_params.fill_none_tensor_list(len(self.layers))
        if self.mapping.is_first_pp_rank():
            x = self.vocab_embedding(input_ids)
        else:
            x = recv(hidden_states, self.mapping.prev_pp_rank())
        x, presents = self.layers.forward(x, kv_cache_params=kv_cache_params, **inputs)
        if self.mapping.is_last_pp_rank():
            return self.ln_f(x), tuple(presents)
        return send(x, self.mapping.next_pp_rank()), tuple(presents)


class OwnModel(decoder.DecoderModelForCausalLM):
    config_class = LLaMAConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config, OwnTransformer(config), classes.head(config))


@pytest.mark.parametrize("plugin", [True, False])
def test_a_transformer_that_sends(plugin: bool, llama: Llama) -> None:
    ids, how = drawn(6), Conversion(pp=2)
    folder = llama.ranks(how)

    def build(mapping: Mapping) -> Any:
        config = LLaMAConfig.from_checkpoint(folder)
        return OwnModel.from_checkpoint(folder, mapping.rank, config)

    run = steps_of(build, how, plugin)
    for begin, end in ((0, 5), (5, 6)):
        logits = run(ids[:, begin:end])["logits"]
        close(logits[:, :VOCAB], llama.states(ids)[-1][:, end - 1])


def packed(rows: list[Any], past: list[int], prompts: list[int], flat: bool) -> dict[str, Any]:
    """The inputs of packed tokens, `rows` of which follow `past` tokens of `prompts`."""
    counts = np.array([len(row) for row in rows])
    ids = np.concatenate(rows)
    places = np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)])
    return {
        "ids": ids if flat else ids[None], "position_ids": places if flat else places[None],
        "context_lengths": np.array(prompts), "host_context_lengths": np.array(prompts),
        "host_request_types": np.array([int(p > 0) for p in past]),
        "host_past_key_value_lengths": np.array(past), "sequence_length": np.array(past) + counts,
        "last_token_ids": np.cumsum(counts),
    }  # fmt: skip


@pytest.mark.parametrize("how", [ONE, Conversion(tp=2, pp=2)])
@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_packed_tokens(how: Conversion, version: Any, llama: Llama) -> None:
    """Prompts of 5 and 2 tokens, a step of both, and a prompt beside a step in one call."""
    ids, source = drawn(7), (of_keywords if version == "0.7" else of_ranks)(llama, how)

    def build(mapping: Mapping) -> Any:
        current_network().plugin_config.enable_remove_input_padding()
        return source(mapping)

    run = steps_of(build, how, True, version)
    first, other = llama.states(ids)[-1]
    fresh_row, _ = llama.states(ids[:, 3:])[-1]
    calls = (
        ([ids[0, :5], ids[1, :2]], [0, 0], [5, 2], (first[4], other[1])),
        ([ids[0, 5:6], ids[1, 2:3]], [5, 2], [5, 2], (first[5], other[2])),
        ([ids[0, 3:7], ids[1, 3:4]], [0, 3], [4, 2], (fresh_row[3], other[3])),
    )
    for rows, past, prompts, wanted in calls:
        logits = run(**packed(rows, past, prompts, version == "0.16"))["logits"]
        close(logits[:, :VOCAB], np.stack(wanted))


class Inputs(Module, GenerationMixin):
    """A model of a script, that makes its inputs as those of 0.5 to 0.7.1 do."""


OLD_KEYS = """
    input_ids hidden_states_input position_ids attention_mask sequence_length context_lengths
    host_past_key_value_lengths host_max_attention_window_sizes past_key_value last_token_ids
    cache_indirection kv_cache_block_pointers_list host_kv_cache_block_pointers_list
    host_context_lengths host_request_types all_reduce_workspace prompt_embedding_table tasks
    prompt_vocab_size lora_ranks lora_weights_pointers
"""


@pytest.mark.parametrize("plugin", [True, False])
def test_inputs_of_older_scripts(plugin: bool) -> None:
    with new_session("0.7"), net_guard(Network()):
        prepare = Inputs().prepare_basic_inputs
        switches = {"use_gpt_attention_plugin": plugin, "gather_all_token_logits": True}
        more: dict[str, Any] = {"dtype": "float16", "num_heads": 4, "mapping": Mapping()}
        inputs = prepare(2, 1, 8, 8, 2, 8, 3, "float16", False, **switches, **more)
        lists = "host_max_attention_window_sizes", "kv_cache_block_pointers_list"
        assert inputs.keys() >= {*OLD_KEYS.split()}
        assert inputs["last_token_ids"] is None
        assert all(inputs[name] == [None] * 3 for name in lists)
        assert (inputs["attention_mask"] is None) == plugin
        assert (inputs["sequence_length"] is None) != plugin
        with pytest.raises(irc.Error, match=r"'gather_logits'"):
            prepare(2, 1, 8, 8, 2, 8, 3, "float16", gather_logits=True)
        with pytest.raises(irc.Error, match="use_lora_plugin is not supported: merge"):
            prepare(2, 1, 8, 8, 2, 8, 3, "float16", use_lora_plugin="float16")


def test_adapters_are_refused_where_they_are_on() -> None:
    assert layers.LoraParams(None, None).get_layer_params(0).is_off()
    with pytest.raises(irc.Error, match="LoRA weights at run time are not supported"):
        layers.LoraParams(["ranks"], ["pointers"])
    with new_session("0.7"), pytest.raises(irc.Error, match="lora_params is not supported: merge"):
        model: Any = classes.LLaMAForCausalLMOfKeywords(2, 2, 2, 16, 32, "silu", 64, "float16")
        with net_guard(Network()):
            ids = Tensor("input_ids", "int32", [1, 4])
            model(ids, lora_params=SimpleNamespace(lora_ranks=["ranks"]))
