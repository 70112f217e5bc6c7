"""Which rank this process is, from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from irc.argument_checks import whole_number_in

# (rank, world size) as the launchers of MPICH and Intel MPI, Open MPI, and Slurm's PMIx set them
RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
# launchers that are none of MPI's: their variables (the same two first), and what to do
_OTHERS = (
    (
        ("RANK", "WORLD_SIZE", "MASTER_PORT"),
        "torchrun started this process, and irc's ranks meet over MPI: mpirun -n {ranks} irc ..., "
        "or irc ... --ranks {ranks}",
    ),
    (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
        "srun started this process without MPI; start it with srun --mpi=pmi2",
    ),
)


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
    for names in RANK_VARIABLES:
        if found := _numbers(environment, names):
            return Place(found[0], found[1])
    for names, refusal in _OTHERS:
        found = _numbers(environment, names)
        if found and found[1] > 1:
            return Place(found[0], found[1], refusal.format(ranks=found[1]))
    return None


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """The values of all these variables as numbers; empty where one is missing."""
    values = [whole_number_in(environment.get(name, "")) for name in names]
    numbers = [number for number in values if number is not None]
    return numbers if len(numbers) == len(values) else []
