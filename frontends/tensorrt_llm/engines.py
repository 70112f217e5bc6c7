"""Engines of a script: bytes and files that name an artifact, which is compiled from all ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ...artifact.manifest import is_artifact
from ...errors import Error, did_you_mean
from ...ir.core import Module
from ...source import here
from .aliases import originals
from .build_config import EngineConfig
from .context import Session, current_session
from .mapping import Mapping
from .merge import merge

if TYPE_CHECKING:
    from ...driver import Artifact
    from ...driver.options import Options
    from .network import Network

_BEGIN = b"irc engine "
_FOLDER = "artifact"  # within the folder of Engine.save
# What a script asks of TensorRT's builder, as options of irc compile.
_OF_ENGINES = {
    "use_refit": "--refit",
    "use_strip_plan": "--strip",
    "weight_streaming": "--weight-streaming",
}


class EngineBuffer(bytes):
    """The engine of one rank, as a script writes it to a file: it names the artifact of all."""

    engine: str
    rank: int
    folder: Path

    def __new__(cls, engine: str, rank: int, folder: Path) -> EngineBuffer:
        facts = {"engine": engine, "rank": rank, "artifact": str(folder)}
        self = super().__new__(cls, _BEGIN + json.dumps(facts).encode())
        self.engine, self.rank, self.folder = engine, rank, folder
        return self

    @property
    def artifact(self) -> Artifact:
        """The artifact, which is compiled when the networks of all ranks are there."""
        return compiled(self.engine)


class Engine:
    """One rank of a built model. `save` writes it to a folder, and the artifact once all ranks are
    there; the folder has an `artifact`, which every other command of irc takes."""

    def __init__(
        self, config: EngineConfig, engine: EngineBuffer, managed_weights: Any = None
    ) -> None:
        self.config, self.engine, self.managed_weights = config, engine, managed_weights

    @property
    def artifact(self) -> Artifact:
        """The artifact of all ranks."""
        return find_artifact(self.engine)

    def save(self, engine_dir: str | os.PathLike[str]) -> None:
        """Write rankN.engine and, from rank 0, config.json; compile when all ranks are there."""
        folder = Path(engine_dir)
        folder.mkdir(parents=True, exist_ok=True)
        buffer = EngineBuffer(self.engine.engine, self.engine.rank, folder.absolute() / _FOLDER)
        self.engine = buffer
        (folder / f"rank{buffer.rank}.engine").write_bytes(buffer)
        if buffer.rank == 0:
            text = json.dumps(self.config.to_dict(), indent=2, default=str)
            (folder / "config.json").write_text(text, encoding="utf-8")
        if is_complete(current_session(), buffer.engine):
            compiled(buffer.engine, buffer.folder)

    @classmethod
    def from_dir(cls, engine_dir: str | os.PathLike[str], rank: int = 0) -> Engine:
        """The engine of a rank in a folder that `save` wrote."""
        folder = Path(engine_dir)
        path = folder / f"rank{rank}.engine"
        if not path.is_file():
            raise Error(f"expected {path}, which Engine.save writes; there is none", loc=here())
        buffer = _read(path.read_bytes(), str(path))
        place = folder.absolute() / _FOLDER  # the folder may have been moved
        found = EngineBuffer(buffer.engine, rank, place if place.is_dir() else buffer.folder)
        return cls(EngineConfig.from_json_file(folder / "config.json"), found)

    @classmethod
    def from_buffer(
        cls, engine_buffer: bytes, json_config_str: str = "{}", rank: int = 0
    ) -> Engine:
        """The engine in bytes that `build_engine` returned or a file holds."""
        found = json.loads(json_config_str)
        config = EngineConfig(found.get("pretrained_config", {}), found.get("build_config", {}))
        return cls(config, _read(engine_buffer, "the engine buffer"))


def register(network: Network, config: Any, name: str = "") -> EngineBuffer:
    """Keep the network of a rank of an engine, by the name and rank of the network's own title.

    A title such as `llama_float16_tp2_rank1.engine` has both.
    """
    session, title = current_session(), str(network.trt_network.name)
    for field, option in _OF_ENGINES.items():
        if getattr(config, field, False):
            session.note(f"{field} has no effect in the script; give irc compile {option}")
    title = title.removesuffix(".engine")
    match = re.fullmatch(r"(.+?)_?rank(\d+)", title)
    engine = match[1] if match else name or (title if title != "network" else "engine")
    engine = re.sub(r"[^\w.-]", "_", engine)
    mapping = network.mapping or session.mapping or _mapping_of(config)
    rank = int(match[2]) if match else mapping.rank
    network.mapping = mapping
    if match is None:
        engine = _free(session, engine, rank)
    session.add(engine, rank, network)
    return EngineBuffer(engine, rank, place_of(session, engine))


def compiled(name: str, folder: Path | None = None, **options: Unpack[Options]) -> Artifact:
    """The artifact of an engine of the session, in `folder`; compiled unless it is there."""
    from ...driver import compile, load

    session = current_session()
    folder = folder or session.artifacts.get(name) or place_of(session, name)
    if session.artifacts.get(name) == folder:
        return load(folder)
    module = merged(name)
    temporary = str(session.folder) in "".join(module.files.values())
    every: Any = {**session.options, **options}
    with originals():  # the backend may import TensorRT
        artifact = compile(module, folder, bundle=temporary, **every)
    session.artifacts[name] = folder
    return artifact


def merged(name: str) -> Module:
    """The module of all ranks of an engine of the session."""
    networks = current_session().networks
    ranks = networks.get(name)
    if ranks is None:
        near = did_you_mean(name, networks)
        raise Error(f"no engine called {name!r} was built in this process{near}", loc=here())
    return merge(ranks, ranks[min(ranks)].mapping, name)


def find_artifact(source: Any) -> Artifact:
    """The artifact of an engine: its bytes, a file of them, a folder of such, an artifact."""
    from ...driver import load

    if isinstance(source, (bytes, bytearray)):
        buffer = _read(bytes(source), "the engine buffer")
        session = current_session()
        own = (place_of(session, buffer.engine), session.artifacts.get(buffer.engine))
        if buffer.engine in session.networks and buffer.folder in own:
            return compiled(buffer.engine, buffer.folder)
        # an engine that is the only one of its script is compiled into the folder itself
        places = (buffer.folder, buffer.folder.parent)
        folder = next((each for each in places if is_artifact(each)), None)
        if folder is None:
            raise Error(
                f"the engine {buffer.engine!r} is in {buffer.folder}, which does not exist; run "
                "its build script to the end with irc compile SCRIPT -o DIR"
            )
        return load(folder)
    path = Path(source)
    if path.is_file():
        return find_artifact(path.read_bytes())
    engines = sorted(path.glob("*.engine"))
    if (path / _FOLDER).is_dir() or is_artifact(path) or not engines:
        return load(path / _FOLDER if (path / _FOLDER).is_dir() else path)
    return find_artifact(engines[0])


def is_complete(session: Session, engine: str) -> bool:
    """Whether the networks of all ranks of an engine are there."""
    ranks = session.networks[engine]
    return len(ranks) == ranks[min(ranks)].mapping.world_size


def place_of(session: Session, engine: str) -> Path:
    """The folder of an engine's artifact."""
    return (session.output or session.folder).absolute() / engine


def _read(data: bytes, what: str) -> EngineBuffer:
    if not data.startswith(_BEGIN):
        raise Error(
            f"{what} is no engine of irc but {len(data)} bytes that begin with {data[:16]!r}; "
            "engines of TensorRT-LLM cannot be loaded, so compile the model again with irc"
        )
    facts = json.loads(data.removeprefix(_BEGIN))
    return EngineBuffer(facts["engine"], facts["rank"], Path(facts["artifact"]))


def _free(session: Session, engine: str, rank: int) -> str:
    """The name, with a number where another engine of the script has it."""
    name, count = engine, 1
    while rank in session.networks.get(name, {}):
        count += 1
        name = f"{engine}_{count}"
    return name


def _mapping_of(config: Any) -> Mapping:
    """The ranks that a builder config states."""
    tp, pp = (int(getattr(config, f"{n}_parallel", 1) or 1) for n in ("tensor", "pipeline"))
    return Mapping(tp * pp, 0, tp_size=tp, pp_size=pp)
