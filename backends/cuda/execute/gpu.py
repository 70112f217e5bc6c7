"""The GPU of one rank and its NCCL groups; what refuses GPUs and ranks that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from irc.backends.cuda.driver import Driver, Gpu
from irc.backends.cuda.group import TIMEOUT, Group, abort, open_group
from irc.backends.cuda.group import Library as Nccl
from irc.backends.cuda.runtime import device_count, driver_version
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error, did_you_mean

CUDA = 13000  # the oldest version that cuda-python and its libraries run on


class RankGpu:
    """One GPU and NCCL, and what its rank holds there: `held` releases it, the latest first.

    `timeout`: seconds in which some rank must make progress. `nccl` replaces the NCCL library.
    """

    def __init__(self, driver: Driver, timeout: float = TIMEOUT, nccl: Nccl | None = None) -> None:
        self.driver = driver
        self._timeout, self._nccl = timeout, nccl
        self.held = ExitStack()
        self.held.callback(driver.close)

    def group(self, host: Communicator, ranks: Sequence[int], label: str) -> Group:
        """The group of these ranks; all of them call this at once. `label` names it in errors."""
        options = {"label": label, "timeout": self._timeout, "meeting": self._timeout + 1}
        group = open_group(host, ranks, self.driver, library=self._nccl, **options)
        self.held.callback(group.close)
        return group

    def close(self) -> None:
        """Release everything, the rest too where something fails; every rank calls it, last."""
        try:
            self.held.close()
        finally:
            self.driver.groups.clear()

    def abandon(self, error: BaseException) -> None:
        """Release everything after an error, without the other ranks, which may wait for this one;
        what they have open of this rank's memory ends with them."""
        abort(self.driver.groups, f"loading failed: {error}")
        with suppress(Error):  # of a GPU that has failed
            self.close()


def open_driver(local_rank: int, instead: str) -> Driver:
    """The GPU with the number of a local rank; 0 where the process sees a single GPU.

    `instead` says what runs without a GPU.
    """
    from irc.backends.cuda.device import CudaDriver

    version = driver_version()
    if version is None:
        raise Error(f"expected a GPU, found no NVIDIA driver (libcuda.so.1); {instead}")
    if version < CUDA:
        raise Error(
            f"expected a GPU with a driver for CUDA {_words(CUDA)} or newer, found one for CUDA "
            f"{_words(version)}: update the NVIDIA driver; {instead}"
        )
    count = device_count()
    if not count:
        raise Error(f"the NVIDIA driver finds no GPU here; {instead}")
    index = 0 if count == 1 else local_rank  # Slurm may show every process only its own
    if index >= count:
        raise Error(
            f"local rank {local_rank} needs GPU {index}, and this host has {count}; start at most "
            f"{count} ranks per host"
        )
    return CudaDriver(index)


def _words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def check_ranks(folder: object, ranks: int, host: Communicator | None) -> Communicator | None:
    """The communicator of a program of `ranks` ranks, None for one; an Error where they differ."""
    if ranks > 1 and host is None:
        raise Error(
            f"{folder} has {ranks} ranks, and each needs a process and a GPU of its own: "
            f"irc generate {folder} --ranks {ranks}, or start irc under mpirun or srun"
        )
    if ranks == 1 or host is None:
        return None
    if host.ranks != ranks:
        raise Error(f"{folder} has {ranks} ranks, and {host.ranks} processes run it")
    return host


def check_distinct(gpu: Gpu, host: Communicator) -> None:
    """An Error where two ranks use one GPU."""
    first: dict[str, int] = {}
    for rank, uuid in enumerate(gathered(host, gpu.uuid)):
        other = first.setdefault(uuid, rank)
        if other != rank:
            raise Error(
                f"ranks {other} and {rank} use the same GPU ({gpu.name}), and each needs "
                "its own: start at most as many processes per host as it has GPUs"
            )


def gathered(host: Communicator, text: str, ranks: Sequence[int] = ()) -> list[str]:
    """The texts of `ranks` (default: of all) in order; each of them calls this at once."""
    roots = ranks or range(host.ranks)
    return [host.broadcast(text.encode(), root, ranks).decode() for root in roots]


G = TypeVar("G", bound=RankGpu)


@contextmanager
def gpu_of_rank(
    options: Mapping[str, Any], host: Communicator | None, open_gpu: Callable[[int], G]
) -> Generator[G]:
    """The GPU of this rank, which is left as it was where the work inside fails.

    It is the one with the number `device` of the options, by default the local rank; `gpu` of the
    options replaces `open_gpu`.
    """
    device: int | None = options.get("device")
    if device is None:
        device = 0 if host is None else host.local_rank
    gpu: G = options.get("gpu", open_gpu)(device)
    try:
        if host is not None:
            check_distinct(gpu.driver.gpu, host)
        yield gpu
    except BaseException as error:
        gpu.abandon(error)
        raise


def check_options(options: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """An Error where a program, which `what` names, has no option of a name."""
    for name in options:
        if name not in known:
            raise Error(
                f"{what} has no option {name}{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
