"""Whether a launcher started this process, and as which rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

# (rank, size) as the launchers of MPICH and Intel MPI, Open MPI and Slurm's PMIx put them
_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
PIPE = "IRC_RANK_PIPE"  # leads to the irc that started this rank
_OWN = (PIPE, "IRC_RANK", "IRC_RANKS")
_TORCHRUN = ("MASTER_PORT", "RANK", "WORLD_SIZE")
_SLURM = ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NTASKS")

MPI, PARENT, ADDRESS = "mpi", "parent", "address"


@dataclass(frozen=True)
class Place:
    """This process as one of `ranks`, before it has met the others.

    `means`: how it meets them: over MPI, through the irc that started it, or at an address that
    the environment says.
    """

    rank: int
    ranks: int
    means: str = MPI


def place_in_world(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where mpiexec, mpirun, srun, torchrun or irc put this process; None where none did."""
    own = _numbers(environment, _OWN)
    if own is not None:
        return Place(own[1], own[2], PARENT)
    mpi = _place_in_mpi(environment)
    if mpi is not None and not _without_mpi(environment):
        return mpi
    torchrun = _numbers(environment, _TORCHRUN)
    if torchrun is not None and environment.get("MASTER_ADDR"):
        return Place(torchrun[1], torchrun[2], ADDRESS)
    slurm = _numbers(environment, _SLURM)
    # a batch script has most of srun's variables, and is no rank
    if slurm is not None and ("SLURM_STEP_ID" in environment or "SLURM_JOB_ID" not in environment):
        return Place(slurm[1], slurm[2], ADDRESS)
    return None


def _place_in_mpi(environment: Mapping[str, str]) -> Place | None:
    for names in _VARIABLES:
        found = _numbers(environment, names)
        if found is not None:
            return Place(found[0], found[1])
    return None


def _without_mpi(environment: Mapping[str, str]) -> bool:
    """Whether srun put MPI's variables there, and no MPI is installed to use them."""
    return "SLURM_PROCID" in environment and find_spec("mpi4py") is None


def _numbers(environment: Mapping[str, str], names: Sequence[str]) -> list[int] | None:
    found = [environment.get(name, "") for name in names]
    return [int(each) for each in found] if all(each.isdecimal() for each in found) else None
