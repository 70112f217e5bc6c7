"""What one run of a script collects, and the network that it builds."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from ...errors import Error
from .errors import NetworkError, ScriptError

if TYPE_CHECKING:
    from .network import Network

NEWEST = 16  # the last release 0.N that api.toml describes
OLDEST = 5


@dataclass
class EngineRecord:
    """An engine that a script builds: the finished networks of its ranks, and where it is written.

    `mapping` has the ranks of its world, `config` the contents of its config.json.
    """

    name: str
    mapping: Any
    config: Any = None
    networks: dict[int, Network] = field(default_factory=dict[int, "Network"])
    saved: Path | None = None  # the folder that the script gives for its artifact
    artifact: Path | None = None  # the folder of its artifact, once it is compiled


@dataclass
class Session:
    """What one run of a script collects.

    `engines` holds the engines by name. `notes` say what was accepted and has no effect, each once.
    """

    release: int = NEWEST  # the N of TensorRT-LLM 0.N that the script is written for
    sources: Path | None = None  # the user's own copy of TensorRT-LLM, for models irc lacks
    output: Path | None = None  # the folder of artifacts, one per engine
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # of their compilation
    dry_run: bool = False  # do not compile the engines that the script saves
    copies: dict[Any, Path] = field(default_factory=dict[Any, Path])  # of models in memory
    lock: Any = field(default_factory=RLock)  # of threads of the script that add files
    engines: dict[str, EngineRecord] = field(default_factory=dict[str, EngineRecord])
    mapping: Any = None  # the last Mapping that the script made
    notes: list[str] = field(default_factory=list[str])
    times: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])  # of profiler
    files: dict[str, Path] = field(default_factory=dict[str, Path])  # of weight references, by name
    _folder: Path | None = None

    def add_file(self, name: str, path: Path) -> str:
        """The name under which weight references read a file."""
        with self.lock:
            alias = next((old for old, other in self.files.items() if other == path), None)
            if alias is None:
                count = sum(other.startswith(name) for other in self.files)
                alias = f"{name}_{count}" if count else name
                self.files[alias] = path
        return alias

    def note(self, text: str) -> None:
        """Add a note, unless it is there."""
        if text not in self.notes:
            self.notes.append(text)

    def add(self, engine: str, rank: int, network: Network, config: Any = None) -> None:
        """Keep the network of one rank of an engine, with the values of its parameters."""
        record = self.engines.setdefault(engine, EngineRecord(engine, network.mapping, config))
        if record.networks.setdefault(rank, network) is not network:
            raise ScriptError(f"engine {engine!r} has two networks for rank {rank}")
        network.finish()

    @property
    def folder(self) -> Path:
        """A folder for arrays of the script, which is removed with the session."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="irc-session-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


_session: ContextVar[Session | None] = ContextVar("irc_trt_llm_session", default=None)
_network: ContextVar[Network | None] = ContextVar("irc_trt_llm_network", default=None)


def current_session() -> Session:
    """The session in progress; one begins where there is none."""
    session = _session.get()
    if session is None:
        session = Session()
        _session.set(session)
    return session


@contextmanager
def new_session(version: str = f"0.{NEWEST}", **options: Any) -> Generator[Session]:
    """A session of its own for the block, for a script of a version of TensorRT-LLM ("0.7.1")."""
    token = _session.set(Session(minor(version), **options))
    try:
        yield current_session()
    finally:
        _session.reset(token)


def minor(version: str) -> int:
    """The N of a version 0.N or 0.N.M, from 5 to 16; later versions are read as 0.16."""
    numbers = re.fullmatch(r"v?(\d+)\.(\d+)(\.\w+)*", version)
    if numbers is None:
        raise Error(f"expected a version of TensorRT-LLM, such as 0.7 or 0.16, found {version!r}")
    number = int(numbers[2]) if numbers[1] == "0" else NEWEST
    if number < OLDEST:
        raise Error(f"irc knows TensorRT-LLM from 0.{OLDEST} on, found {version}")
    return min(number, NEWEST)


def current_network() -> Network:
    """The network in progress; an Error says that there is none."""
    network = _network.get()
    if network is None:
        raise NetworkError(
            "expected a network in progress; write this inside `with net_guard(network):`"
        )
    return network


@contextmanager
def building(network: Network) -> Generator[None]:
    """Make a network the one in progress for the block."""
    token = _network.set(network)
    try:
        yield
    finally:
        _network.reset(token)
