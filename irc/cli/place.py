"""Whether MPI's launcher started this process, and as which rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, size) as the launchers of MPICH and Intel MPI, Open MPI and Slurm's PMIx put them
_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


@dataclass(frozen=True)
class Place:
    """This process as one of `ranks`, before MPI has started."""

    rank: int
    ranks: int


def place_in_world(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where mpiexec, mpirun or srun put this process; None where none of them started it."""
    for rank, ranks in _VARIABLES:
        found = environment.get(rank, ""), environment.get(ranks, "")
        if all(each.isdecimal() for each in found):
            return Place(int(found[0]), int(found[1]))
    return None
