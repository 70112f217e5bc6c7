"""The choice of a scheme per site for a budget of bits or of error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, log10, prod

import numpy as np

from irc.errors import Error
from irc.ir.dtypes import dtype
from irc.pipeline import Stats
from irc.quantization.formats import decode, encode
from irc.quantization.rounding import as_f32
from irc.quantization.schemes import Scheme, scheme_called
from irc.quantization.sites import Site

from ..shard.plan import Plan
from .algorithms import Array, Context
from .assignment import Assigner, Assignment
from .awq import Weights, output_error, sampled, search
from .gptq import Compensation, compensation, gptq

# and the weights as they are
SCHEMES = ("w4a16", "w4a16_awq", "w4a16_gptq", "w8a16", "w8a16_gptq", "w8a16_fp8")


@dataclass(frozen=True)
class Choice:
    """A scheme for a site ("" leaves it as it is), the bits of all its weights, and its noise.

    `noise` is the power of the error of the outputs, relative to that of the outputs.
    """

    scheme: str
    bits: float
    noise: float


@dataclass(frozen=True)
class Budget:
    """At most `bits` per weight, or at least `decibels` between the outputs and their noise."""

    bits: float = inf
    decibels: float = -inf

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget such as "4.5 bits", "30 dB" or "sqnr 30 dB"."""
        match = re.fullmatch(r"\s*(?:sqnr\s+)?(\d+(?:\.\d+)?)\s*(bits?|db)\s*", text, re.IGNORECASE)
        if match is None:
            raise Error(f'no budget: {text!r}; write bits per weight, as in "4.5 bits", or "30 dB"')
        number = float(match[1])
        return cls(decibels=number) if match[2].lower() == "db" else cls(bits=number)

    def __str__(self) -> str:
        return f"{self.decibels:g} dB" if self.bits == inf else f"{self.bits:g} bits"


def choose(
    sites: Mapping[str, Sequence[Choice]], weights: int, budget: Budget
) -> dict[str, Choice]:
    """One choice per site, within the budget for so many weights in all sites.

    All sites begin with their cheapest choice. Better ones are taken in the order of the noise that
    they save per bit: as long as the bits suffice, or until the mean noise is low enough. One
    scheme for all sites is chosen where it is better. An Error names the reachable range.
    """
    ladders = {name: _frontier(choices) for name, choices in sites.items()}
    lowest = {name: ladder[0] for name, ladder in ladders.items()}
    highest = {name: ladder[-1] for name, ladder in ladders.items()}
    if mean_bits(lowest, weights) > budget.bits or decibels(highest) < budget.decibels:
        raise Error(
            f"the budget of {budget} cannot be met: {mean_bits(lowest, weights):.3f} to "
            f"{mean_bits(highest, weights):.3f} bits per weight give "
            f"{decibels(lowest):.1f} to {decibels(highest):.1f} dB"
        )
    steps = [(name, *pair) for name, ladder in ladders.items() for pair in pairwise(ladder)]
    chosen, closed = lowest, set[str]()
    for name, _, after in sorted(steps, key=lambda step: -_saving(*step[1:])):
        if decibels(chosen) >= budget.decibels > -inf:
            break
        if name in closed or mean_bits(chosen | {name: after}, weights) > budget.bits:
            closed.add(name)
        else:
            chosen[name] = after
    schemes = dict.fromkeys(choice.scheme for choices in sites.values() for choice in choices)
    for scheme in schemes:  # in order, so that the same one of equals is chosen each time
        alike = {name: c for name, choices in sites.items() for c in choices if c.scheme == scheme}
        if len(alike) == len(sites) and _better(alike, chosen, weights, budget):
            chosen = alike
    return chosen


def _better(
    one: Mapping[str, Choice], other: Mapping[str, Choice], weights: int, budget: Budget
) -> bool:
    """Whether choices are within the budget, and make less noise, or take fewer bits for it."""
    bits, noise = mean_bits(one, weights), -decibels(one)
    if bits > budget.bits or -noise < budget.decibels:
        return False
    now = mean_bits(other, weights), -decibels(other)
    return (noise, bits) < now[::-1] if budget.bits < inf else (bits, noise) < now


def mean_bits(chosen: Mapping[str, Choice], weights: int) -> float:
    """The bits per weight."""
    return sum(choice.bits for choice in chosen.values()) / weights


def decibels(chosen: Mapping[str, Choice]) -> float:
    """The mean noise of the outputs of all sites, as a signal-to-noise ratio."""
    noise = sum(choice.noise for choice in chosen.values()) / len(chosen)
    return -10 * log10(noise) if noise else inf


def _frontier(choices: Sequence[Choice]) -> list[Choice]:
    """The choices by rising bits of which each next one saves less noise per bit."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bits, choice.noise)):
        if kept and choice.noise >= kept[-1].noise:
            continue
        while len(kept) > 1 and _saving(kept[-1], choice) >= _saving(*kept[-2:]):
            kept.pop()
        kept.append(choice)
    return kept


def _saving(before: Choice, after: Choice) -> float:
    """The noise that a better choice saves per bit."""
    return (before.noise - after.noise) / (after.bits - before.bits)


def choose_schemes(sites: Sequence[Site], context: Context) -> dict[str, Scheme]:
    """The schemes by the names of sites, for the budget of the pass; others stay as they are."""
    budget = Budget.parse(context.budget)
    assigner = Assigner(Plan.of(context.plan, context.module, Stats()))
    distinct = {site.name: site for site in sites}
    if not distinct:
        raise Error("auto: no site is left to choose a scheme for")
    choices = {name: _choices(site, assigner, context) for name, site in distinct.items()}
    weights = sum(prod(site.shape) for site in distinct.values())
    chosen = choose(choices, weights, budget)
    bits, noise = mean_bits(chosen, weights), decibels(chosen)
    if not any(choice.scheme for choice in chosen.values()):
        raise Error(
            f"auto: a budget of {budget} leaves all weights as they are; ask for fewer bits "
            "or decibels"
        )
    context.stats.explain(f"auto: {bits:.3f} bits per weight, {noise:.1f} dB")
    return {name: scheme_called(c.scheme) for name, c in chosen.items() if c.scheme}


def _choices(site: Site, assigner: Assigner, context: Context) -> list[Choice]:
    """The schemes of a site, and none, with what each costs."""
    kind = dtype(site.weight.type.dtype)
    choices = [Choice("", prod(site.shape) * kind.bits, 0.0)]
    statistics = context.statistics
    gram = mean = by = None
    if statistics is not None and statistics.has_gram(*site.keys):
        gram, mean = statistics.gram(*site.keys), statistics.mean(site.key)
        by = compensation(gram, site.name)
    for scheme in SCHEMES:
        assigned = assigner.assign(site, scheme_called(scheme))
        if assigned.scheme.algorithm != "round" and gram is None:
            continue
        weights = sampled(assigned, context)
        noise = output_error(_error(weights, assigned.scheme, mean, gram, by), gram)
        signal = output_error(weights.values, gram)
        choices.append(Choice(scheme, _bits(assigned), noise / signal if noise else 0.0))
    return choices


def _error(
    weights: Weights,
    scheme: Scheme,
    mean: Array | None,
    gram: Array | None,
    by: Compensation | None,
) -> Array:
    """The error of some rows of a weight by the algorithm of a scheme."""
    if by is None or mean is None or gram is None or scheme.algorithm == "round":
        return weights.error()
    if scheme.algorithm == "awq":
        factors = search([replace(weights, method="absmax")], mean, gram)[0]
        return min((weights.error(), weights.error(factors)), key=lambda e: output_error(e, gram))
    rounded = encode(
        weights.values, weights.format, weights.block, weights.scale_dtype, weights.method
    )
    steps = np.repeat(as_f32(rounded.scales), len(gram) // rounded.scales.shape[1], axis=1)
    codes = gptq(weights.values, by, weights.format.codes, steps)
    return decode(replace(rounded, codes=codes)) - weights.values


def _bits(assigned: Assignment) -> float:
    """The bits of codes and scales."""
    return sum(dtype(kind).bits * prod(shape) for kind, shape in assigned.parts.values())
