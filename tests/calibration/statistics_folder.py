"""`write_folder`: a calibration folder from the inputs of linears, as arrays."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from irc.quantization.statistics import Facts, RunningStatistics, Statistics
from irc.weights.safetensors import write_tensors

FILE = "statistics.safetensors"


def write_folder(
    folder: Path, inputs: Mapping[str, np.ndarray], gram: bool = True, model: str = "m"
) -> Statistics:
    """The statistics of activations [..., K] by site (the name of a weight without `.weight`)."""
    arrays: dict[str, np.ndarray] = {}
    tokens = 0
    for site, values in inputs.items():
        observed = RunningStatistics(values.shape[-1], gram)
        observed.add(values)
        arrays |= {f"{site}/{key}": array for key, array in observed.state.items()}
        tokens = max(tokens, int(observed.state["rows"][0]))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / FILE, arrays)
    sites = {site: site for site in inputs}
    Facts(model, tokens, 1, gram=gram, files=[FILE], sites=sites).write(folder)
    return Statistics(folder)
