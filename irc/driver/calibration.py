"""`calibrate`: statistics of the activations of any source."""

from __future__ import annotations

from typing import Any

from ..artifact.manifest import Progress, silent
from ..ir.core import Module
from ..quantization import calibration
from ..quantization.statistics import Statistics
from .sources import PathLike, Source, find_source


def calibrate(
    src: PathLike | Module | Source,
    data: PathLike,
    output: PathLike,
    *,
    gram: bool = False,
    batches: int = 0,
    batch_size: int = 0,
    length: int = 0,
    memory: int = 2048,
    progress: Progress | None = None,
    **options: Any,
) -> Statistics:
    """Run a model on data, and write statistics of the inputs of its linears into a folder.

    The arguments are those of `irc.quantization.calibration.calibrate`, and the `options` of a
    source: `checkpoint`, `adapter`, `dtype`, `settings`, `dims`, `random_weights`.
    """
    source = src if isinstance(src, Source) else find_source(src, **options)
    return calibration.calibrate(
        source.module,
        source.folder,
        data,
        output,
        gram=gram,
        batches=batches,
        batch_size=batch_size,
        length=length,
        memory=memory,
        progress=progress or silent,
    )
