"""Artifacts with fake engines: the files of the backend, without its builder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import irc.passes
from irc.backends.cuda.execute.program import GpuProgram
from irc.backends.cuda.group import Group
from irc.backends.ranks.communicator import Communicator
from irc.backends.tensorrt.backend import TensorRTBackend
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.runtime.load import EngineGpu, load
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from tests.tensorrt import fake_nccl
from tests.tensorrt.fake_gpu import SOON, FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl
from tests.tensorrt.runtime_engine import MARK, Artifact, FakeDevice, FakeTensorRT

assert irc.passes
VERSION = "1.7.1.116"


def write(
    folder: Path, module: Module, mesh: str = "", first: str = "", **options: Any
) -> dict[str, Any]:
    """Compile a module into a folder; the facts, with engines that the fake library reads.

    `first` are passes that run before those of the backend.
    """
    backend = TensorRTBackend("tensorrt-rtx").configured({"build": False, **options})
    pipeline = backend.default_pipeline
    if mesh:
        from irc.ir.mesh import Mesh

        module.mesh = Mesh.parse(mesh)
        pipeline = backend.sharded_pipeline
    run_pipeline(module, f"{first}, {pipeline}" if first else pipeline)
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = dict(backend.emit(module, folder, base=folder).facts)
    facts["dims"] = {name: list(each) for name, each in module.dims.items()}
    (folder / "module.irc").write_text(str(module))
    for entry in facts["ranks"]:
        entry["engine"] = entry["model"].replace(".onnx", ".engine")
        bindings = entry["bindings"]
        own = json.loads((folder / bindings).read_text()) if bindings else {}
        write_engine(folder / entry["engine"], entry["stage"], weights=own)
    return facts


def write_engine(path: Path, stage: int = 0, **own: Any) -> None:
    """An engine file for the fake library."""
    path.write_bytes(MARK + json.dumps({"stage": stage, **own}).encode())


class FakeRank(EngineGpu):
    """The GPU of a rank: its parts are fakes, which tests change. `faults`: of groups, by label."""

    driver: FakeDriver

    def __init__(self, artifact: Artifact, nccl: FakeNccl, rank: int) -> None:
        driver = FakeDriver(rank)
        self.trt = FakeTensorRT(artifact, rank, FakeDevice(driver, nccl))
        super().__init__(driver, Library("tensorrt-rtx", self.trt, VERSION), SOON, nccl)
        self.rank, self.calls, self.contexts = rank, driver.calls, self.trt.contexts
        self.faults: dict[str, str] = {}

    def group(self, host: Communicator, ranks: Sequence[int], label: str) -> Group:
        group = super().group(host, ranks, label)
        group.communicator.fault = self.faults.get(label, "")
        return group


class World(fake_nccl.World[GpuProgram[EngineRank], FakeRank]):
    """An artifact loaded on all its ranks. `prepare` changes a rank's GPU."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        prepare: Callable[[FakeRank], None] = lambda gpu: None,
        **options: Any,
    ) -> None:
        self.artifact = Artifact(folder, facts)

        def make(nccl: FakeNccl, rank: int) -> FakeRank:
            gpu = FakeRank(self.artifact, nccl, rank)
            prepare(gpu)
            return gpu

        super().__init__(
            len(facts["ranks"]),
            make,
            lambda host, gpu: load(folder, facts, communicator=host, gpu=gpu, **options),
        )
