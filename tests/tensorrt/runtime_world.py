"""Artifacts whose engines are fakes: what the backend writes, without its builder."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import irc.passes
from irc.backends.communicator import Communicator
from irc.backends.onnxruntime.threads import ThreadWorld
from irc.backends.tensorrt.backend import TensorRTBackend
from irc.backends.tensorrt.runtime import EngineProgram, load
from irc.core import Module
from irc.pipeline import run_pipeline
from tests.tensorrt.runtime_engine import MARK, Driver, Library
from tests.tensorrt.runtime_gpu import Fabric

assert irc.passes
T = TypeVar("T")


def write(
    folder: Path, module: Module, mesh: str = "", first: str = "", **options: Any
) -> dict[str, Any]:
    """Compile a module into a folder; the facts, with engines that the fake library reads.

    `first` are passes that run before those of the backend.
    """
    backend = TensorRTBackend("tensorrt-rtx").configured({"build": False, **options})
    pipeline = backend.default_pipeline
    if mesh:
        from irc.mesh import Mesh

        module.mesh = Mesh.parse(mesh)
        pipeline = backend.sharded_pipeline
    run_pipeline(module, f"{first}, {pipeline}" if first else pipeline)
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = dict(backend.emit(module, folder, {"base": folder}))
    facts["dims"] = {name: list(each) for name, each in module.dims.items()}
    (folder / "module.irc").write_text(str(module))
    for entry in facts["ranks"]:
        entry["engine"] = entry["model"].replace(".onnx", ".engine")
        bindings = entry["bindings"]
        own = json.loads((folder / bindings).read_text()) if bindings else {}
        write_engine(folder / entry["engine"], weights=own)
    if facts["probe"] is not None:
        facts["probe"]["engine"] = "probe.engine"
        write_engine(folder / "probe.engine")
    return facts


def write_engine(
    path: Path, version: tuple[int, ...] = (1, 7, 1, 116), mask: int = 0x1E, **own: Any
) -> None:
    """An engine file that begins as one of TensorRT-RTX does."""
    body = MARK + json.dumps(own).encode()
    head = struct.pack("<4s4xI4xQ4B4sI", b"vtrt", 2, 64 + len(body), *version, b"vtrt", mask)
    path.write_bytes(head.ljust(64, b"\0") + body)


class World:
    """An artifact loaded on all its ranks, each in a thread. `prepare` changes a rank's driver."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        prepare: Callable[[Driver], None] = lambda driver: None,
        **options: Any,
    ) -> None:
        self.ranks = len(facts["ranks"])
        self.library = Library(folder, facts)
        self.fabric = Fabric()
        self.world = ThreadWorld(self.ranks, timeout=100)
        self.drivers: dict[int, Any] = {}

        def one(communicator: Communicator) -> EngineProgram:
            rank = communicator.rank

            def make(number: int) -> Any:
                driver = self.drivers[rank] = self.driver(number)
                prepare(driver)
                return driver

            host = communicator if self.ranks > 1 else None
            loaded = load(folder, facts, communicator=host, driver=make, **options)
            assert isinstance(loaded, EngineProgram)
            return loaded

        self.programs = self.each(one)

    def driver(self, number: int) -> Any:
        """What drives the GPU of a rank."""
        return Driver(self.library, self.fabric, number)

    @contextmanager
    def entered(self, rank: int) -> Iterator[None]:
        """Inside, this thread is a rank."""
        yield

    def each(self, work: Callable[[Communicator], T]) -> list[T]:
        """What `work` gives on every rank; where one fails, the others' groups break."""

        def one(communicator: Communicator) -> T:
            try:
                with self.entered(communicator.rank):
                    return work(communicator)
            except BaseException as error:
                self.fabric.fail(f"another rank failed: {error}")
                raise

        return self.world.run(one)

    def of_all(self, work: Callable[[EngineProgram], T]) -> list[T]:
        """What `work` gives with the program of every rank."""
        return self.each(lambda communicator: work(self.programs[communicator.rank]))

    def close(self) -> None:
        self.of_all(lambda program: program.close())
        self.library.close()
