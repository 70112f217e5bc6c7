"""Rows of weights as f32 arrays [N, K] of K inputs each, read a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

import numpy as np

from irc.quantization.sites import Site
from irc.weights.checkpoint import Reader, convert

from .algorithms import Array

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
    found = list(_regions(site, LENGTH))
    if len(found) > RUNS:
        found = [found[i * len(found) // RUNS] for i in range(RUNS)]
    return np.concatenate([_rows(reader, site, ranges) for ranges in found])


def largest_weights(reader: Reader, site: Site) -> Array:
    """The largest magnitude per input."""
    found = np.zeros(site.shape[site.inputs], np.float32)
    for _, rows in row_blocks(reader, site):
        np.maximum(found, np.abs(rows).max(axis=0), out=found)
    return found


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
