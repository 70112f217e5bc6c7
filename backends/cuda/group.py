"""One rank of a group of GPUs that communicate through NCCL."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any


def unique_id() -> bytes:
    """A name for a new group; one rank makes it, and hands it to the others."""
    from nccl import core

    return bytes(core.get_unique_id())


def nccl_version() -> str:
    """The version of the NCCL library that is loaded."""
    from nccl import core

    library = core.get_version().libnccl
    return "unknown" if library is None else str(library.version)


class Group:
    """The communicator of this process's GPU; every rank of the group makes one at once."""

    def __init__(self, name: bytes, rank: int, ranks: int) -> None:
        from nccl import core

        self._core, self.rank, self.ranks = core, rank, ranks
        self._communicator = core.Communicator.init(ranks, rank, core.UniqueId.from_bytes(name))

    def enqueue(self, kind: str, source: Any, target: Any, stream: int, root: int = 0) -> None:
        """Enqueue a collective, summing where it reduces; arrays are on this rank's GPU.

        `kind` is one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce,
        gather and scatter. `source` and `target` are what this rank gives and gets, along the
        first dimension.
        """
        group, total = self._communicator, self._core.SUM
        match kind:
            case "all_reduce":
                group.allreduce(source, target, total, stream=stream)
            case "all_gather":
                group.allgather(source, target, stream=stream)
            case "reduce_scatter":
                group.reduce_scatter(source, target, total, stream=stream)
            case "all_to_all":
                group.alltoall(source, target, stream=stream)
            case "broadcast":
                group.broadcast(source, target, root, stream=stream)
            case "reduce":
                group.reduce(source, target, total, root, stream=stream)
            case "gather":
                group.gather(source, target, root, stream=stream)
            case "scatter":
                group.scatter(source, target, root, stream=stream)
            case _:
                raise ValueError(f"no collective called {kind!r}")

    def close(self) -> None:
        """Give up the communicator; every rank calls it."""
        self._communicator.destroy()
