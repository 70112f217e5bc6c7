"""PluginConfig and BuildConfig: the defaults of each version, and Errors about other names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm.builder import _input_options, build
from irc.frontends.tensorrt_llm.context import current_session, new_session
from irc.frontends.tensorrt_llm.dtypes import DataType
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.settings import (
    BuildConfig,
    ContextFMHAType,
    KVCacheType,
    PluginConfig,
    get_kv_cache_type_from_legacy,
    settings,
)

from .test_builder import Scale

# Values that TensorRT-LLM's own PluginConfig() has.
DEFAULTS: dict[str, dict[str, Any]] = {
    "0.5": {"gpt_attention_plugin": False, "gemm_plugin": False, "tokens_per_block": 0},
    "0.7": {"lora_plugin": False, "multi_block_mode": False, "use_custom_all_reduce": False},
    "0.8": {"gpt_attention_plugin": "float16", "gemm_plugin": None, "tokens_per_block": 128},
    "0.10": {"moe_plugin": "float16", "tokens_per_block": 64, "context_fmha": True},
    "0.16": {"nccl_plugin": "float16", "use_fused_mlp": True, "user_buffer": False},
}


@pytest.mark.parametrize("version", DEFAULTS)
def test_defaults_of_a_version(version: str) -> None:
    with new_session(version):
        config = PluginConfig()
        assert {name: getattr(config, name) for name in DEFAULTS[version]} == DEFAULTS[version]


def test_switches_that_are_off_are_false() -> None:
    """TensorRT-LLM's models mark caches as outputs where `paged_kv_cache == False`."""
    for version in ("0.7", "0.16"):
        with new_session(version):
            config = PluginConfig()
            assert config.paged_kv_cache is False and config.remove_input_padding is False
            config.enable_paged_kv_cache()
            assert config.paged_kv_cache is False
            (note,) = current_session().notes
            assert note == "paged_kv_cache has no effect: caches are contiguous, without pages"
            config.to_legacy_setting()
            switches = [n for n, row in settings("plugin").items() if row.takes == "SWITCH"]
            assert all(getattr(config, name) is False for name in switches)


def test_setting_switches() -> None:
    with new_session("0.7"):
        config = PluginConfig().set_nccl_plugin("float16", True).set_gpt_attention_plugin(None)
        assert config.nccl_plugin == "float16" and config.gpt_attention_plugin is None
    with new_session("0.16"):
        config = PluginConfig()
        config.dtype = "bfloat16"
        assert config.gpt_attention_plugin == "bfloat16" and config.gemm_plugin is None
        assert config._gpt_attention_plugin == "auto"
        config.set_gemm_plugin(dtype=DataType.HALF).set_nccl_plugin("float32")
        config.set_context_fmha(ContextFMHAType.enabled_with_fp32_acc).enable_qk_half_accum()
        assert config.context_fmha_type is ContextFMHAType.enabled_with_fp32_acc
        assert (config.gemm_plugin, config.nccl_plugin) == ("float16", "float32")
        assert config.attention_qk_half_accumulation
        config.set_smooth_quant_plugins()
        assert config.quantize_tensor_plugin and config.smooth_quant_gemm_plugin == "bfloat16"
        again = PluginConfig.from_dict(config.to_dict() | {"gemm_plugin": "disable"})
        assert again.gemm_plugin is None and again.nccl_plugin == "float32"


def test_kinds_of_caches() -> None:
    pairs = ((True, True), (True, False), (False, True))
    kinds = [get_kv_cache_type_from_legacy(*pair) for pair in pairs]
    assert kinds == [KVCacheType.PAGED, KVCacheType.CONTINUOUS, KVCacheType.DISABLED]


def _built(**fields: Any) -> Any:
    return build(Scale(np.ones(4, np.float32), Mapping()), BuildConfig(**fields))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a table": (lambda: PluginConfig.from_dict({"gpt_atention_plugin": None}), "'gpt_attention_pl"),
    "a switch": (lambda: setattr(PluginConfig(), "context_fhma", True), "mean 'context_fmha'"),
    "a value": (lambda: PluginConfig().set_gemm_plugin("half"), "gemm_plugin is 'half'; expected"),
    "no dtype": (lambda: setattr(PluginConfig(), "dtype", "auto"), "expected that of the model"),
    "a window": (lambda: setattr(PluginConfig(), "streamingllm", True), "keep all tokens"),
    "a field": (lambda: setattr(BuildConfig(), "max_batchsize", 3), "mean 'max_batch_size'"),
    "adapters": (
        lambda: _built(lora_config={"lora_dir": ["x"]}),
        "lora_config is not supported; merge the adapters",
    ),
    "mrope": (lambda: _built(use_mrope=True), "use_mrope is not supported"),
    "drafts": (lambda: _built(speculative_decoding_mode="medusa"), "logits of draft tokens"),
    "parallel": (lambda: _built(auto_parallel_config={"world_size": 2}), "--mesh tp=N"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with new_session("0.16"), pytest.raises(irc.Error) as error:
        call()
    assert re.search(message, error.value.message) and "test_settings.py" in str(error.value)


def test_fields_reach_the_inputs_of_a_model() -> None:
    def prepare(
        max_batch_size: int, opt_batch_size: int, opt_num_tokens: Any, use_cache: bool
    ) -> None: ...

    with new_session("0.16"):
        config = BuildConfig(max_batch_size=3, opt_batch_size=2, opt_num_tokens=5, max_num_tokens=9)
        wanted = {"max_batch_size": 3, "opt_batch_size": 2, "opt_num_tokens": 5, "use_cache": True}
        assert _input_options(prepare, config) == wanted
        (note,) = current_session().notes
        assert note == "max_num_tokens has no effect: prepare_inputs does not take it"
        config.kv_cache_type = "disabled"
        assert _input_options(prepare, config)["use_cache"] is False


def _model(tp: int, rank: int) -> Scale:
    return Scale(np.full(4, 10 * tp + rank, np.float32), Mapping(tp, rank, tp_size=tp))


def test_worlds_of_one_script_keep_apart(tmp_path: Path) -> None:
    """A one-rank engine and one of two ranks, built in any order, and saved to folders."""
    options: dict[str, Any] = {"backend": "reference"}
    with new_session("0.16", output=tmp_path / "out", options=options) as session:
        one: Any = build(_model(1, 0))
        pairs: list[Any] = [build(_model(2, rank)) for rank in range(2)]
        again: list[Any] = [build(_model(2, rank)) for rank in range(2)]
        assert list(session.engines) == ["Scale", "Scale_2", "Scale_3"]
        for engine in (*pairs, one):
            engine.save(tmp_path / ("one" if engine is one else "two"))
        for engine in (pairs[0], again[1]):  # other ranks than those of one name belong together
            engine.save(tmp_path / "mixed")
        x = np.ones((1, 4), np.float32)
        for folder, ranks in (("one", 1), ("two", 2), ("mixed", 2)):
            artifact = irc.load(tmp_path / folder / "artifact")
            assert artifact.module.mesh.ranks == ranks
            if ranks == 1:
                assert artifact.run({"x": x})["y"].tolist() == [[11.0] * 4]
