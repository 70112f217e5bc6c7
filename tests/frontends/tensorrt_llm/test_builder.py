"""`Builder`, `build`, `Engine`, and settings by version: scripts per rank leave artifacts."""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm.builder import Builder, Engine, _input_options, build
from irc.frontends.tensorrt_llm.context import Session, current_session, new_session
from irc.frontends.tensorrt_llm.dtypes import DataType
from irc.frontends.tensorrt_llm.engines import compiled, find_artifact, merged
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.settings import (
    BuildConfig,
    ContextFMHAType,
    KVCacheType,
    PluginConfig,
    get_kv_cache_type_from_legacy,
    settings,
)
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.fresh import fresh

BACKEND: dict[str, Any] = {"backend": "reference"}


@pytest.fixture(autouse=True)
def session(tmp_path: Path) -> Iterator[Session]:
    """A session of its own, whose artifacts come into `out`."""
    with new_session("0.16", output=tmp_path / "out", options=BACKEND) as own:
        yield own


class Scale(Module):
    """x [B, 4] times the factors of the rank."""

    def __init__(self, factors: np.ndarray, mapping: Mapping) -> None:
        self.factors = Parameter(factors)
        self.config = SimpleNamespace(mapping=mapping, architecture="Scale", to_dict=dict)

    def prepare_inputs(self, max_batch_size: int) -> dict[str, Any]:
        return {"x": x_input(max_batch_size)}

    def forward(self, x: Tensor) -> None:
        y = x * self.factors.value
        self.register_network_output("product", y)
        (y + 1.0).mark_output("y", "float32")


def x_input(most: int) -> Tensor:
    """An input [B, 4] of up to `most` rows."""
    ranges = OrderedDict([("B", [[1, 1, most]]), ("width", [4])])
    return Tensor("x", "float32", [-1, 4], ranges)


def test_engine_files_of_an_old_script_name_the_artifact(tmp_path: Path) -> None:
    """What build.py of 0.5 to 0.7 does."""
    factors, x = fresh().random(4, np.float32), fresh(1).random((2, 4), np.float32)
    builder = Builder()
    config = builder.create_builder_config(name="scale", precision="float32", num_layers=3)
    network = builder.create_network()
    network.trt_network.name = "scale_float32_tp1_rank0.engine"
    network.plugin_config.set_nccl_plugin("float32")
    model = Scale(factors, Mapping())
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        model(x_input(5))
    engine, path = builder.build_engine(network, config), tmp_path / "rank0.engine"
    builder.save_config(config, tmp_path / "config.json")
    path.write_bytes(bytearray(engine))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["builder_config"]["num_layers"] == 3
    assert saved["plugin_config"]["nccl_plugin"] == "float32"
    artifact = compiled("scale_float32_tp1")
    assert artifact.folder == tmp_path / "out" / "scale_float32_tp1"
    assert artifact.manifest["dims"] == {"B": [1, 1, 5]}
    for source in (path, path.read_bytes()):
        y = find_artifact(source).run({"x": x})["y"]
        np.testing.assert_allclose(y, x * factors + 1, rtol=1e-5)


@pytest.mark.parametrize("debug", [False, True])
def test_build_and_save(debug: bool, tmp_path: Path) -> None:
    factors, x = fresh().random(4, np.float32), fresh(1).random((3, 4), np.float32)
    config = BuildConfig.from_dict({"max_batch_size": 7, "enable_debug_output": debug})
    engine = build(Scale(factors, Mapping()), config)
    assert engine is not None
    engine.save(tmp_path / "engine")
    written = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert written["build_config"]["max_batch_size"] == 7
    with new_session():  # another process
        again = Engine.from_dir(tmp_path / "engine")
        assert again.config.build_config.max_batch_size == 7
        assert list(again.artifact.manifest["dims"]["B"]) == [1, 1, 7]
        results = again.artifact.run({"x": x})
        np.testing.assert_allclose(results["y"], x * factors + 1, rtol=1e-5)
        assert set(results) == ({"y", "product"} if debug else {"y"})


def test_engines_of_ranks_are_saved_together(tmp_path: Path) -> None:
    for rank in range(2):
        engine = build(Scale(np.ones(4, np.float32), Mapping(2, rank, tp_size=2)))
        assert engine is not None
        engine.save(tmp_path / "engine")
        assert (tmp_path / "engine" / "artifact").is_dir() == (rank == 1)
    assert irc.load(tmp_path / "engine" / "artifact").module.mesh.ranks == 2


def test_options_of_a_build(session: Session) -> None:
    model = Scale(np.ones(4, np.float32), Mapping())
    assert build(model, BuildConfig(dry_run=True)) is None and not session.engines
    build(model, BuildConfig(weight_streaming=True))
    (note,) = session.notes
    assert note.endswith("has no effect in the script; give irc compile --weight-streaming")


def test_build_config_of_a_table() -> None:
    table: dict[str, Any] = {"max_input_len": 3, "kv_cache_type": "PAGED"}
    config = BuildConfig.from_dict(table | {"plugin_config": {"paged_state": False}})
    assert config.kv_cache_type is KVCacheType.PAGED and config.max_input_len == 3
    assert config.plugin_config.paged_state is False
    assert BuildConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def built(**fields: Any) -> Any:
    return build(Scale(np.ones(4, np.float32), Mapping()), BuildConfig(**fields))


def set_switch(name: str, value: Any) -> None:
    setattr(PluginConfig(), name, value)


# part of the message -> what is refused
REFUSED: dict[str, Callable[[], Any]] = {
    "did you mean 'max_batch_size'": lambda: BuildConfig.from_dict({"max_batchsize": 3}),
    "mean 'max_batch_size'": lambda: setattr(BuildConfig(), "max_batchsize", 3),
    "did you mean 'paged'": lambda: BuildConfig(kv_cache_type="pages"),
    "plugin_config is 3; expected a Plug": lambda: BuildConfig(plugin_config=3),
    "is damaged; run the build script": lambda: find_artifact(b"irc engine {"),
    "is no engine of irc but 8 bytes": lambda: find_artifact(b"ftrt1234"),
    "rank0.engine, which Engine.save writes": lambda: Engine.from_dir("nowhere"),
    "expected a network with outputs": lambda: Builder().build_engine(
        Network(), Builder().create_builder_config("float32")
    ),
    "'gpt_attention_pl": lambda: PluginConfig.from_dict({"gpt_atention_plugin": None}),
    "mean 'context_fmha'": lambda: set_switch("context_fhma", True),
    "gemm_plugin is 'half'; expected": lambda: PluginConfig().set_gemm_plugin("half"),
    "expected that of the model": lambda: set_switch("dtype", "auto"),
    "keep all tokens": lambda: set_switch("streamingllm", True),
    "lora_config is not supported; merge": lambda: built(lora_config={"lora_dir": ["x"]}),
    "use_mrope is not supported": lambda: built(use_mrope=True),
    "logits of draft tokens": lambda: built(speculative_decoding_mode="medusa"),
    "create_network of TensorRT's builder": lambda: Builder().trt_builder.create_network(),
    "--mesh tp=N": lambda: built(auto_parallel_config={"world_size": 2}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(irc.Error) as error:
        REFUSED[message]()
    assert re.search(message, error.value.message)  # not the line of this table
    assert "test_builder.py" in str(error.value) or "the engine buffer" in error.value.message


def test_a_world_of_one_rank_after_a_larger_one(tmp_path: Path) -> None:
    """In 0.7 the last Mapping that a script makes says which world a network belongs to."""
    with new_session("0.7", output=tmp_path, options=BACKEND) as session:
        for world, ranks in (("two", 2), ("one", 1)):
            for rank in range(ranks):
                mapping = Mapping(world_size=ranks, rank=rank, tp_size=ranks)
                builder = Builder()
                network = builder.create_network()
                with net_guard(network):
                    Scale(np.ones(4, np.float32), mapping)(x_input(5))
                config = builder.create_builder_config("float32", name=world)
                engine = builder.build_engine(network, config)
                assert engine.engine == world
        assert {name: merged(name).mesh.ranks for name in session.engines} == {"two": 2, "one": 1}


def test_the_builder_of_tensorrt() -> None:
    builder = Builder().trt_builder
    config = builder.create_builder_config()
    config.set_flag("REFIT")
    with net_guard(network := Network()):
        (Tensor("x", "float32", [2]) + 1.0).mark_output("y")
    engine = builder.build_engine(network, config).serialize()
    assert engine.artifact.run({"x": np.ones(2, np.float32)})["y"].tolist() == [2, 2]


def _model(tp: int, rank: int) -> Scale:
    return Scale(np.full(4, 10 * tp + rank, np.float32), Mapping(tp, rank, tp_size=tp))


def test_worlds_of_one_script_keep_apart(tmp_path: Path) -> None:
    """A one-rank engine and one of two ranks, built in any order, and saved to folders."""
    with new_session("0.16", output=tmp_path / "out", options=BACKEND) as session:
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


# -- settings

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
