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
from .aliases import originals
from .api import api
from .context import EngineRecord, current_session
from .errors import ScriptError
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

    def serialize(self) -> EngineBuffer:
        """Itself: an engine of irc is bytes."""
        return self

    @property
    def artifact(self) -> Artifact:
        """The artifact of all ranks, which is compiled when their networks are there."""
        from ...driver import load

        record = current_session().engines.get(self.engine)
        if record is not None and self.folder in (_place_of(self.engine), record.artifact):
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
        folder, rank = Path(engine_dir), self.engine.rank
        record = _record_of(folder.absolute() / _FOLDER, self.engine)
        if record is not None and record.saved is not None:
            self.engine = EngineBuffer(record.name, rank, record.saved)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{rank}.engine").write_bytes(self.engine)
        if rank == 0:
            text = json.dumps(self.config.to_dict(), indent=2, default=str)
            (folder / "config.json").write_text(text, encoding="utf-8")
        is_last = record is not None and len(record.networks) == record.mapping.world_size
        if is_last and not current_session().dry_run:
            compiled(self.engine.engine, self.engine.folder)

    @classmethod
    def from_dir(cls, engine_dir: str | os.PathLike[str], rank: int = 0) -> Engine:
        """The engine of a rank in a folder that `save` wrote."""
        folder = Path(engine_dir)
        path = folder / f"rank{rank}.engine"
        if not path.is_file():
            raise ScriptError(f"expected {path}, which Engine.save writes; there is none")
        buffer = EngineBuffer.read(path.read_bytes(), str(path))
        place = folder.absolute() / _FOLDER  # the folder may have been moved
        moved = EngineBuffer(buffer.engine, rank, place if place.is_dir() else buffer.folder)
        return cls(EngineConfig.from_json_file(folder / "config.json"), moved)


def register(network: Network, config: Any, name: str, facts: Any = None) -> EngineBuffer:
    """Keep the network of a rank of an engine, by the name and rank of the network's own title.

    A title such as `llama_float16_tp2_rank1.engine` has both. Other engines of a name are numbered:
    a rank belongs to the first engine of its world that lacks it. `facts` are for config.json, if
    they are not those of the config.
    """
    session = current_session()
    for field, option in _OF_ENGINES.items():
        if getattr(config, field, False):
            session.note(f"{field} has no effect in the script; give irc compile {option}")
    title = network.name.removesuffix(".engine")
    match = re.fullmatch(r"(.+?)_?rank(\d+)", title)
    network.mapping = network.mapping or session.mapping or _mapping_of(config)
    rank = int(match[2]) if match else network.mapping.rank
    engine = match[1] if match else name or (title if title != "network" else "engine")
    engine = re.sub(r"[^\w.-]", "_", engine)
    engine = engine if match else _free_name(engine, rank, network)
    session.add(engine, rank, network, facts or config)
    return EngineBuffer(engine, rank, _place_of(engine))


def _free_name(first: str, rank: int, network: Network) -> str:
    """The first of NAME, NAME_2, ... that is no engine yet, or one of this world without a rank."""
    for name in itertools.chain([first], (f"{first}_{count}" for count in itertools.count(2))):
        record = current_session().engines.get(name)
        is_same_world = record is None or record.mapping.mesh == network.mapping.mesh
        if record is None or (is_same_world and rank not in record.networks):
            return name
    raise AssertionError


def _record_of(place: Path, engine: EngineBuffer) -> EngineRecord | None:
    """The engine that is saved to a folder, whose ranks belong together, with this rank of an
    engine; None where it was read from a folder."""
    session, rank = current_session(), engine.rank
    record = session.engines.get(engine.engine)
    if record is None or rank not in record.networks:
        return None
    own = next((record for record in session.engines.values() if record.saved == place), None)
    if own is record or (own is None and record.saved is None):
        record.saved = place
        return record
    network = record.networks.pop(rank)
    if not record.networks:
        del session.engines[record.name]
    name = own.name if own else _free_name(record.name, rank, network)
    own = session.engines.setdefault(name, EngineRecord(name, network.mapping, record.config))
    if rank in own.networks:  # the folder is written again
        own.artifact = None
    own.networks[rank], own.saved = network, place
    return own


def compiled(name: str, folder: Path | None = None) -> Artifact:
    """The artifact of an engine of the session, in `folder`; compiled unless it is there."""
    from ...driver import compile, load

    session, record = current_session(), _record(name)
    folder = folder or record.artifact or _place_of(name)
    if record.artifact == folder:
        return load(folder)
    module = merged(name)
    temporary = str(session.folder) in "".join(module.files.values())
    options = session.options | ({"bundle": True} if temporary else {})
    with originals():  # the backend may import TensorRT
        artifact = compile(module, folder, **options)
    record.artifact = folder
    return artifact


def merged(name: str) -> Module:
    """The module of all ranks of an engine of the session."""
    record = _record(name)
    return merge(record.networks, record.mapping, name)


def _record(name: str) -> EngineRecord:
    engines = current_session().engines
    if name not in engines:
        near = did_you_mean(name, engines)
        raise ScriptError(f"no engine called {name!r} was built in this process{near}")
    return engines[name]


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


def _place_of(engine: str) -> Path:
    """The folder of an engine's artifact."""
    session = current_session()
    return (session.output or session.folder).absolute() / engine


def _mapping_of(config: Any) -> Mapping:
    """The ranks that a builder config states."""
    tp, pp = (int(getattr(config, f"{n}_parallel", 1) or 1) for n in ("tensor", "pipeline"))
    return Mapping(tp * pp, 0, tp_size=tp, pp_size=pp)
