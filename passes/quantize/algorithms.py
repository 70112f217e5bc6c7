"""What algorithms share: registries, samples of weights, stored results, rescaled inputs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from irc.errors import Error
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.ops import LayerNorm, Linear, Mul, RmsNorm
from irc.pipeline import Stats
from irc.quantization.sites import Site
from irc.quantization.statistics import Statistics
from irc.weights import Cast, FileRef, ProductRef, Ref, with_shape
from irc.weights.checkpoint import Reader, convert
from irc.weights.safetensors import write_tensors

from ..shard.plan import DEFAULT
from ..shared.edit import free_name, insert_before, used_once
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

RESCALE: dict[str, Rescale] = {}
ENCODE: dict[str, Encode] = {}


def check_algorithms(assigned: Sequence[Assignment], context: Context) -> None:
    """An Error where an algorithm is not known, or lacks the statistics that it needs."""
    for scheme in {assignment.scheme.name: assignment.scheme for assignment in assigned}.values():
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
            names = ", ".join(("round", *RESCALE, *ENCODE))
            raise Error(f"{scheme.name}: no algorithm called {scheme.algorithm}; known are {names}")


def check_statistics(assigned: Sequence[Assignment], context: Context) -> None:
    """An Error where the statistics are those of other inputs."""
    statistics = context.statistics
    for site in {one.site.key: one.site for one in assigned}.values():
        if statistics is not None and site.key in statistics.facts.sites:
            statistics.check_width(site.key, site.shape[site.inputs])


# -- rows of weights as f32 arrays [N, K] of K inputs each, read a block at a time


Ranges: TypeAlias = tuple[tuple[int, int], ...]  # begin and end per dimension of the weight
ELEMENTS = 16 << 20  # of a block
RUNS, LENGTH = 2, 128  # runs of rows in a sample, and the rows of each


def row_blocks(reader: Reader, site: Site) -> Iterator[tuple[Ranges, Array]]:
    """(the region in the weight, its rows) of all rows, in order."""
    step = max(1, ELEMENTS // (site.shape[site.inputs] * LENGTH)) * LENGTH
    for ranges in _regions(site, step):
        yield ranges, _rows(reader, site, ranges)


def sample(reader: Reader, site: Site) -> Array:
    """Some runs of rows, evenly spaced, by which choices for the weight are made."""
    regions = list(_regions(site, LENGTH))
    if len(regions) > RUNS:
        regions = [regions[i * len(regions) // RUNS] for i in range(RUNS)]
    return np.concatenate([_rows(reader, site, ranges) for ranges in regions])


def largest_weights(reader: Reader, site: Site) -> Array:
    """The largest magnitude per input."""
    largest = np.zeros(site.shape[site.inputs], np.float32)
    for _, rows in row_blocks(reader, site):
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
    return largest


def _regions(site: Site, step: int) -> Iterator[Ranges]:
    """Regions of at most `step` rows, each within one expert."""

    def parts(dim: int, size: int) -> list[tuple[int, int]]:
        length = {site.inputs: size, site.outputs: step}.get(dim, 1)
        return [(at, min(at + length, size)) for at in range(0, size, length)]

    return product(*(parts(dim, size) for dim, size in enumerate(site.shape)))


def as_rows(values: Array, site: Site) -> Array:
    """A region of the weight within one expert (or of its scales) as [N, K]; a view."""
    rows = np.moveaxis(values, (site.outputs, site.inputs), (-2, -1))
    return rows[(0,) * (rows.ndim - 2)]


def spread(blocks: Array, shape: Sequence[int], ranges: Ranges) -> Array:
    """An element per block of a tensor of `shape`, as one per element of a region."""
    pairs = zip(ranges, shape, blocks.shape, strict=True)
    return blocks[np.ix_(*(np.arange(*span) // (size // count) for span, size, count in pairs))]


def _rows(reader: Reader, site: Site, ranges: Ranges) -> Array:
    return as_rows(convert(reader.region(site.weight, ranges), "f32"), site)


# -- what algorithms compute for a site, kept in the calibration folder for the next time


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
    weights = [
        (assignment.site.name, assignment.site.weight, assignment.block) for assignment in group
    ]
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
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


# -- factors of inputs: weights are multiplied by them, the inputs divided by them


def rescale(
    group: Sequence[Assignment], context: Context, settings: object, find: Callable[[], Array]
) -> Array | None:
    """Divide the value that some sites multiply by the factors [K] that `find` computes.

    The inverse of the factors goes into the weights of the operations that make the value; where
    that is not possible a `mul` is inserted. Sites whose weights have other uses are left alone.
    """
    sites = [assignment.site for assignment in group]
    if not _own_weights(sites):
        context.stats.explain(f"{sites[0].name}: not rescaled, its weight has other uses")
        return None
    kind = sites[0].x.type.dtype

    def compute() -> dict[str, Array]:
        # rounded, so that it cancels the factors after a cast
        inverse = (1 / find()).astype(numpy_dtype(kind)).astype(np.float32)
        return {"factors": 1 / inverse, "inverse": inverse}

    file = stored(group, context, settings, compute)
    factors, inverse = FileRef(file, "factors"), FileRef(file, "inverse")
    for weight, dim in {site.weight: site.inputs for site in sites}.items():
        _multiply(weight, factors, dim)
    before = _scaling(sites[0].x, {site.op for site in sites})
    for weight in before:
        _multiply(weight, inverse, 0)
    if not before:
        _insert_mul(context.module, sites, inverse)
    context.stats.count("inverse folded" if before else "inverse multiplied")
    return context.reader.read(factors)


def _own_weights(sites: Sequence[Site]) -> bool:
    """Whether nothing but these sites uses their weights."""
    operands = {site.op for site in sites} | {site.weight_operand.producer for site in sites}
    return all(set(site.weight.users) <= operands for site in sites)


def _multiply(weight: Weight, factors: Ref, dim: int) -> None:
    """Multiply a weight by factors along a dimension."""
    ref = with_shape(weight.ref, weight.type.shape, weight.type.dtype)
    weight.ref = ProductRef(ref, factors, dim)


def _insert_mul(module: Module, sites: Sequence[Site], inverse: Ref) -> None:
    x, name = sites[0].x, free_name(f"{sites[0].name}.input_factors", module.weights)
    kind = x.type.dtype
    ref = inverse if kind == "f32" else inverse.then(Cast(kind))
    weight = module.add_weight(Weight(TensorType(kind, x.type.shape[-1:]), name, ref))
    product = insert_before(Mul(x, weight), sites[0].op).result
    for op in {site.op: None for site in sites}:
        op.set_operands((product, *op.operands[1:]))


def _scaling(value: Value, users: Collection[Op]) -> list[Weight]:
    """The weights, by dimension 0, that scale the features of a value; none if it has other users.

    They are those of a norm or a linear, also of one that a product multiplies.
    """
    op = value.producer
    if op is None or not set(value.users) <= set(users):
        return []
    match op:
        case RmsNorm(offset=0.0) | LayerNorm(weight=Weight()) | Linear():
            weights = op.operands[1:]
            own = all(isinstance(operand, Weight) and used_once(operand) for operand in weights)
            return [operand for operand in weights if isinstance(operand, Weight)] if own else []
        case Mul():
            sides = (operand for operand in op.operands if operand.type.shape == value.type.shape)
            scaling = (_scaling(operand, {op}) for operand in sides if used_once(operand))
            return next(filter(None, scaling), list[Weight]())
        case _:
            return []
