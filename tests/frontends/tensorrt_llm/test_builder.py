"""`Builder`, `build` and `Engine`: scripts per rank leave one artifact per engine."""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm.builder import BuildConfig, Builder, Engine, KVCacheType, build
from irc.frontends.tensorrt_llm.context import Session, new_session
from irc.frontends.tensorrt_llm.engines import compiled, find_artifact, merged
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.fresh import fresh

BACKEND: dict[str, Any] = {"backend": "reference"}


@pytest.fixture(autouse=True)
def session(tmp_path: Path) -> Iterator[Session]:
    """A session of its own, whose artifacts come into `out`."""
    with new_session("0.16", output=tmp_path / "out", options=BACKEND) as found:
        yield found


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
    found = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert found["build_config"]["max_batch_size"] == 7
    with new_session():  # another process
        again = Engine.from_dir(tmp_path / "engine")
        assert again.config.build_config.max_batch_size == 7
        assert list(again.artifact.manifest["dims"]["B"]) == [1, 1, 7]
        results = again.artifact.run({"x": x})
        np.testing.assert_allclose(results["y"], x * factors + 1, rtol=1e-5)
        assert set(results) == ({"y", "product"} if debug else {"y"})
        buffer = (tmp_path / "engine" / "rank0.engine").read_bytes()
        assert Engine.from_buffer(buffer).artifact.folder == again.artifact.folder


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
    table: dict[str, Any] = {
        "max_input_len": 3,
        "kv_cache_type": "PAGED",
        "plugin_config": {"paged_state": False},
    }
    config = BuildConfig.from_dict(table)
    assert config.kv_cache_type is KVCacheType.PAGED and config.max_input_len == 3
    assert config.plugin_config.paged_state is False
    assert BuildConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


REFUSED = {
    "a field": (lambda: BuildConfig.from_dict({"max_batchsize": 3}), "did you mean 'max_batch_s"),
    "a kind of cache": (lambda: BuildConfig(kv_cache_type="pages"), "did you mean 'paged'"),
    "no switches": (lambda: BuildConfig(plugin_config=3), "plugin_config is 3; expected a Plug"),
    "cut bytes": (lambda: find_artifact(b"irc engine {"), "is damaged; run the build script"),
    "bytes": (lambda: find_artifact(b"ftrt1234"), "is no engine of irc but 8 bytes"),
    "a folder": (lambda: Engine.from_dir("nowhere"), "rank0.engine, which Engine.save writes"),
    "no outputs": (
        lambda: Builder().build_engine(Network(), Builder().create_builder_config("float32")),
        "expected a network with outputs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(irc.Error, match=message):
        call()


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
