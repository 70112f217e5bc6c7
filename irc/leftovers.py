"""Folders beside an artifact that it is written into, and what stays of them if irc is killed.

Their name says which running system writes them, and they are held (locks.py) as long as somebody
does. So one of this system that nobody holds has lost its writer; of others nothing is known.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .locks import held

PART, OLD = ".part", ".old"


@contextmanager
def temporary(output: Path) -> Generator[Path]:
    """A new empty sibling of `output`, held for the length of the block; it is not removed."""
    while True:
        name = tempfile.mkdtemp(prefix=_prefix(output), suffix=PART, dir=output.parent)
        with held(Path(name)):
            if Path(name).exists():  # and was not taken for a leftover before it was held
                yield Path(name)
                return


def clear(output: Path) -> None:
    """Remove the siblings that writers of `output` left when they were killed.

    An older artifact that had stepped aside comes back if nothing has taken its place. What cannot
    be removed stays.
    """
    for path in list(_siblings(output)):
        if not path.name.startswith(_prefix(output)):
            continue
        with held(path, wait=False) as dead, suppress(OSError):
            if dead and path.suffix == OLD and not output.exists():
                path.rename(output)
            elif dead:
                shutil.rmtree(path)


def leftovers(output: Path) -> list[tuple[Path, bool]]:
    """The siblings that writers of `output` use or left, each with whether its writer is known to
    be dead."""
    return [(path, _is_dead(path, output)) for path in _siblings(output)]


def _is_dead(path: Path, output: Path) -> bool:
    if not path.name.startswith(_prefix(output)):
        return False
    with held(path, wait=False) as dead:
        return dead


def _siblings(output: Path) -> Iterator[Path]:
    if not output.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.\w{{8}}({PART}|{OLD})")
    for path in sorted(output.parent.iterdir()):
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _prefix(output: Path) -> str:
    """How the siblings begin that this running system writes."""
    return f".{output.name}.{_system()}."


def _system() -> str:
    """A name for the system that runs, another one after each start; its locks can be trusted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]
