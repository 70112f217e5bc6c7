"""`write_folder`: a calibration folder from the inputs of linears, as arrays."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from irc.quantization.observed import Observed, summaries, summarized
from irc.quantization.statistics import STATISTICS, Facts, Statistics, write_facts
from irc.quantization.tensors import write_tensors


def write_folder(
    folder: Path, inputs: Mapping[str, np.ndarray], gram: bool = True, model: str = "m"
) -> Statistics:
    """The statistics of activations [..., K] by site (the name of a weight without `.weight`)."""
    arrays: dict[str, np.ndarray] = {}
    tokens = 0
    for site, values in inputs.items():
        observed = Observed(values.shape[-1], gram)
        observed.add(values)
        arrays |= {f"{site}/{key}": array for key, array in summary(observed).items()}
        tokens = max(tokens, observed.rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / STATISTICS, arrays)
    write_facts(folder, Facts(model, tokens, 1, gram=gram, sites={site: site for site in inputs}))
    return Statistics(folder)


def summary(observed: Observed) -> dict[str, np.ndarray]:
    """What a calibration folder holds of a value."""
    state = observed.state()
    found = summaries(len(observed.largest), observed.products is not None)
    return {what: summarized(state.__getitem__, what) for what in found}
