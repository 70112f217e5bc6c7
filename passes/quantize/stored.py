"""What algorithms compute for a site, kept in files of the calibration folder for the next time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from irc.quantization.tensors import write_tensors

from ..shared.edit import free_name
from .algorithms import Array, Context
from .assignment import Assignment


def stored(
    group: Sequence[Assignment],
    context: Context,
    settings: object,
    compute: Callable[[], Mapping[str, Array]],
) -> str:
    """The module's name of a file of arrays, which are computed unless there is such a file.

    The file's name has a checksum of the weights, the calibration, the scheme and `settings`.
    """
    algorithm, site = group[0].scheme.algorithm, group[0].site.name
    digest = hashlib.sha256(repr(_inputs(group, context, settings)).encode()).hexdigest()[:16]
    folder = Path(context.calibration).resolve() / algorithm
    path = folder / f"{quote(site, safe='')}-{digest}.safetensors"
    if not path.is_file():
        context.reader.check_copied(assigned.site.weight for assigned in group)
        folder.mkdir(exist_ok=True)
        write_tensors(path, compute())
    return _add_file(context, f"{algorithm}.{site}", path)


def _add_file(context: Context, name: str, path: Path) -> str:
    files = context.module.files
    if files.get(name) != str(path):
        name = free_name(name, files)
        files[name] = str(path)
    return name


def _inputs(group: Sequence[Assignment], context: Context, settings: object) -> list[object]:
    """All that the arrays depend on."""
    weights = [(each.site.name, each.site.weight, each.block) for each in group]
    refs = [context.reader.complete(weight) for _, weight, _ in weights]
    files = {context.reader.path(file) for ref in refs for file in ref.files()}
    return [
        group[0].scheme,
        context.calibrated(group[0].scheme.name).facts.key,
        settings,
        [(name, str(weight.type), block) for name, weight, block in weights],
        [str(ref) for ref in refs],
        sorted((path, *_version(path)) for path in files),
    ]


def _version(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
