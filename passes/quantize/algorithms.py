"""The algorithms that schemes name, beside rounding to nearest, and what they work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import Stats
from irc.quantization.sites import Site
from irc.quantization.statistics import Statistics
from irc.weights import Ref
from irc.weights.checkpoint import Reader

from ..shard.plan import DEFAULT
from .assignment import Assignment

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Context:
    """What the pass and its algorithms share; `calibration` is a folder, or empty."""

    module: Module
    stats: Stats
    calibration: str = ""
    observer: str = ""
    budget: str = ""
    plan: str = DEFAULT

    @cached_property
    def reader(self) -> Reader:
        """Reads the weights of the module."""
        return Reader(self.module)

    @cached_property
    def statistics(self) -> Statistics | None:
        """The statistics of the calibration, if there was one."""
        return Statistics(Path(self.calibration)) if self.calibration else None

    def calibrated(self, scheme: str) -> Statistics:
        """The statistics; an Error where there are none."""
        if self.statistics is None:
            raise Error(
                f"{scheme} needs statistics of the inputs of layers; give --calibration DATA, or "
                'calibration="FOLDER" as irc calibrate writes it'
            )
        return self.statistics


# Rescales the inputs and weights of sites that multiply one value, in place: inputs are divided by
# the factors [K] that it returns, columns of the weights multiplied. None changes nothing.
Rescale: TypeAlias = Callable[[Sequence[Assignment], Context], Array | None]
# The references of the parts of one quantized weight: codes, scales, and zeros or tensor_scale.
Encode: TypeAlias = Callable[[Assignment, Context], Mapping[str, Ref]]
# The name of the scheme of every site, "" to leave it as it is.
Choose: TypeAlias = Callable[[Sequence[Site], Context], Mapping[str, str]]

RESCALE: dict[str, Rescale] = {}
ENCODE: dict[str, Encode] = {}
CHOOSE: dict[str, Choose] = {}


def check_algorithms(assigned: Sequence[Assignment], context: Context) -> None:
    """An Error where an algorithm is not known, or lacks the statistics that it needs."""
    for scheme in {each.scheme.name: each.scheme for each in assigned}.values():
        if scheme.algorithm == "round":
            continue
        if scheme.optional and context.statistics is None:
            context.stats.explain(
                f"{scheme.name} without calibration: codes are rounded to nearest; with "
                f"--calibration {scheme.algorithm} moves outliers of inputs into the weights"
            )
            continue
        context.calibrated(scheme.name)
        if scheme.algorithm not in (*RESCALE, *ENCODE):
            known = ", ".join(("round", *RESCALE, *ENCODE))
            raise Error(f"{scheme.name}: no algorithm called {scheme.algorithm}; known are {known}")


def check_statistics(assigned: Sequence[Assignment], context: Context) -> None:
    """An Error where the statistics are those of other inputs."""
    known = context.statistics
    for site in {one.site.key: one.site for one in assigned}.values():
        if known is not None and site.key in known.facts.sites:
            known.check_width(site.key, site.shape[site.inputs])
