"""`write_folder`: a calibration folder from the inputs of linears, as arrays."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from irc.quantization.observed import Observed
from irc.quantization.statistics import Facts, Statistics, write_statistics


def write_folder(
    folder: Path, inputs: Mapping[str, np.ndarray], gram: bool = True, model: str = "m"
) -> Statistics:
    """The statistics of activations [..., K] by site (the name of a weight without `.weight`)."""
    observed: dict[str, Observed] = {}
    for site, values in inputs.items():
        observed[site] = Observed(values.shape[-1], gram)
        observed[site].add(values)
    tokens = max((each.rows for each in observed.values()), default=0)
    facts = Facts(model, tokens, 1, gram=gram, sites={site: site for site in inputs})
    write_statistics(folder, observed, facts)
    return Statistics(folder)
