"""Engines of a script: bytes and files that name an artifact, which is compiled from all ranks."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.manifest import is_artifact
from ...errors import Error, did_you_mean
from ...ir.core import Module
from ...source import here
from .aliases import originals
from .api import api
from .context import Session, current_session
from .mapping import Mapping
from .merge import merge
from .settings import EngineConfig

if TYPE_CHECKING:
    from ...driver import Artifact
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

    def __new__(cls, engine: str, rank: int, folder: str | Path) -> EngineBuffer:
        facts = {"engine": engine, "rank": rank, "folder": str(folder)}
        self = super().__new__(cls, _BEGIN + json.dumps(facts).encode())
        self.engine, self.rank, self.folder = engine, rank, Path(folder)
        return self

    @classmethod
    def read(cls, data: bytes, what: str = "the engine buffer") -> EngineBuffer:
        """The engine in bytes; an Error about those of TensorRT."""
        if data.startswith(_BEGIN):
            try:
                return cls(**json.loads(data.removeprefix(_BEGIN)))
            except (ValueError, TypeError):
                raise Error(f"{what} is damaged; run the build script again") from None
        raise Error(
            f"{what} is no engine of irc but {len(data)} bytes that begin with {data[:16]!r}; "
            "engines of TensorRT-LLM cannot be loaded, so compile the model again with irc"
        )

    @property
    def artifact(self) -> Artifact:
        """The artifact of all ranks, which is compiled when their networks are there."""
        from ...driver import load

        session = current_session()
        own = (_place_of(session, self.engine), session.artifacts.get(self.engine))
        if self.engine in session.networks and self.folder in own:
            return compiled(self.engine, self.folder)
        # an engine that is the only one of its script is compiled into the folder itself
        for folder in (self.folder, self.folder.parent):
            if is_artifact(folder):
                return load(folder)
        raise Error(
            f"the engine {self.engine!r} is in {self.folder}, which does not exist; run its build "
            "script to the end with irc compile SCRIPT -o DIR"
        )


@api("builder.Engine")
class Engine:
    """One rank of a built model. `save` writes it to a folder, and the artifact once all ranks are
    there; the folder has an `artifact`, which every other command of irc takes."""

    def __init__(self, config: EngineConfig, engine: EngineBuffer) -> None:
        self.config, self.engine = config, engine

    @property
    def artifact(self) -> Artifact:
        """The artifact of all ranks."""
        return self.engine.artifact

    def save(self, engine_dir: str | os.PathLike[str]) -> None:
        """Write rankN.engine and, from rank 0, config.json; compile when all ranks are there."""
        folder, rank, session = Path(engine_dir), self.engine.rank, current_session()
        place = folder.absolute() / _FOLDER
        name = _regrouped(session, self.engine, place)
        folder.mkdir(parents=True, exist_ok=True)
        self.engine = EngineBuffer(
            name, rank, place if name in session.networks else self.engine.folder
        )
        (folder / f"rank{rank}.engine").write_bytes(self.engine)
        if rank == 0:
            text = json.dumps(self.config.to_dict(), indent=2, default=str)
            (folder / "config.json").write_text(text, encoding="utf-8")
        ranks = session.networks.get(name, {})
        is_last = bool(ranks) and len(ranks) == ranks[min(ranks)].mapping.world_size
        if is_last and not session.dry_run:
            compiled(name, self.engine.folder)

    @classmethod
    def from_dir(cls, engine_dir: str | os.PathLike[str], rank: int = 0) -> Engine:
        """The engine of a rank in a folder that `save` wrote."""
        folder = Path(engine_dir)
        path = folder / f"rank{rank}.engine"
        if not path.is_file():
            raise Error(f"expected {path}, which Engine.save writes; there is none", loc=here())
        buffer = EngineBuffer.read(path.read_bytes(), str(path))
        place = folder.absolute() / _FOLDER  # the folder may have been moved
        found = EngineBuffer(buffer.engine, rank, place if place.is_dir() else buffer.folder)
        return cls(EngineConfig.from_json_file(folder / "config.json"), found)

    @classmethod
    def from_buffer(cls, engine_buffer: bytes, json_config_str: str = "{}") -> Engine:
        """The engine in bytes that `build_engine` returned or a file holds."""
        config = EngineConfig.from_dict(json.loads(json_config_str))
        return cls(config, EngineBuffer.read(engine_buffer))


def register(network: Network, config: Any, name: str = "") -> EngineBuffer:
    """Keep the network of a rank of an engine, by the name and rank of the network's own title.

    A title such as `llama_float16_tp2_rank1.engine` has both. Other engines of a name are numbered:
    a rank belongs to the first engine of its world that lacks it.
    """
    session = current_session()
    for field, option in _OF_ENGINES.items():
        if getattr(config, field, False):
            session.note(f"{field} has no effect in the script; give irc compile {option}")
    title = str(network.trt_network.name).removesuffix(".engine")
    match = re.fullmatch(r"(.+?)_?rank(\d+)", title)
    network.mapping = network.mapping or session.mapping or _mapping_of(config)
    rank = int(match[2]) if match else network.mapping.rank
    engine = match[1] if match else name or (title if title != "network" else "engine")
    engine = re.sub(r"[^\w.-]", "_", engine)
    if match is None:
        engine = _free_name(session, engine, rank, network)
    session.add(engine, rank, network)
    return EngineBuffer(engine, rank, _place_of(session, engine))


def _free_name(session: Session, first: str, rank: int, network: Network) -> str:
    """The first of NAME, NAME_2, ... that is no engine yet, or one of this world without a rank."""
    world = {**network.mapping.to_dict(), "rank": 0}
    for count in itertools.count(1):
        name = first if count == 1 else f"{first}_{count}"
        ranks = session.networks.get(name, {})
        worlds = [{**each.mapping.to_dict(), "rank": 0} for each in ranks.values()]
        if rank not in ranks and all(each == world for each in worlds):
            return name
    raise AssertionError


def _regrouped(session: Session, engine: EngineBuffer, place: Path) -> str:
    """The engine of a rank that is saved to a folder: ranks of one folder are one engine."""
    name, rank = engine.engine, engine.rank
    own = session.saved.get(place)
    ranks = session.networks.get(name, {})
    if rank not in ranks:
        return name  # it was read from a folder
    network, taken = ranks[rank], {*session.saved.values()}
    if own == name or (own is None and name not in taken):
        session.saved[place] = name
        return name
    del ranks[rank]
    if not ranks:
        del session.networks[name]
    own = own or _free_name(session, name, rank, network)
    if rank in session.networks.get(own, {}):  # the folder is written again
        session.artifacts.pop(own, None)
    session.networks.setdefault(own, {})[rank] = network
    session.saved[place] = own
    return own


def compiled(name: str, folder: Path | None = None) -> Artifact:
    """The artifact of an engine of the session, in `folder`; compiled unless it is there."""
    from ...driver import compile, load

    session = current_session()
    folder = folder or session.artifacts.get(name) or _place_of(session, name)
    if session.artifacts.get(name) == folder:
        return load(folder)
    module = merged(name)
    temporary = str(session.folder) in "".join(module.files.values())
    with originals():  # the backend may import TensorRT
        artifact = compile(module, folder, bundle=temporary, **session.options)
    session.artifacts[name] = folder
    return artifact


def merged(name: str) -> Module:
    """The module of all ranks of an engine of the session."""
    networks = current_session().networks
    if name not in networks:
        near = did_you_mean(name, networks)
        raise Error(f"no engine called {name!r} was built in this process{near}", loc=here())
    ranks = networks[name]
    return merge(ranks, ranks[min(ranks)].mapping, name)


def find_artifact(source: Any) -> Artifact:
    """The artifact of an engine: its bytes, a file of them, a folder of such, an artifact."""
    from ...driver import load

    if isinstance(source, (bytes, bytearray)):
        return EngineBuffer.read(bytes(source)).artifact
    path = Path(source)
    saved = path / _FOLDER if (path / _FOLDER).is_dir() else path
    engines = [path] if path.is_file() else sorted(path.glob("*.engine"))
    if not engines or is_artifact(saved):
        return load(saved)
    return EngineBuffer.read(engines[0].read_bytes(), str(engines[0])).artifact


def _place_of(session: Session, engine: str) -> Path:
    """The folder of an engine's artifact."""
    return (session.output or session.folder).absolute() / engine


def _mapping_of(config: Any) -> Mapping:
    """The ranks that a builder config states."""
    tp, pp = (int(getattr(config, f"{n}_parallel", 1) or 1) for n in ("tensor", "pipeline"))
    return Mapping(tp * pp, 0, tp_size=tp, pp_size=pp)
