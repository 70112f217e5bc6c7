"""Which rank this process is, from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, world size) as the launchers of MPICH and Intel MPI, Open MPI, and Slurm's PMIx set them
_RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_TORCHRUN = ("MASTER_PORT", "RANK", "WORLD_SIZE")
_SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")


@dataclass(frozen=True)
class Place:
    """This process as one of `ranks` of an MPI run.

    `refusal`: why it is no rank, where a launcher started it that is none of MPI's.
    """

    rank: int
    ranks: int
    refusal: str = ""


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that mpiexec, mpirun or srun gave this process; None where none of them did."""
    for names in _RANK_VARIABLES:
        found = _numbers(environment, names)
        if found:
            return Place(found[0], found[1])
    torchrun = _numbers(environment, _TORCHRUN)
    if torchrun and torchrun[2] > 1:
        instead = f"mpirun -n {torchrun[2]} irc ..., or irc ... --ranks {torchrun[2]}"
        refusal = f"torchrun started this process, and irc's ranks meet over MPI: {instead}"
        return Place(torchrun[1], torchrun[2], refusal=refusal)
    slurm = _numbers(environment, _SLURM)
    if slurm and slurm[2] > 1:
        refusal = "srun started this process without MPI; start it with srun --mpi=pmi2"
        return Place(slurm[1], slurm[2], refusal=refusal)
    return None


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """The values of all these variables as numbers; empty where one is missing."""
    found = [environment.get(name, "") for name in names]
    return [int(each) for each in found] if all(each.isdecimal() for each in found) else []
