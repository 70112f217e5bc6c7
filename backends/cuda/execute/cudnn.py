"""cuDNN's attention on device memory, through nvidia-cudnn-frontend."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from irc.backends.cuda.driver import Driver
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Settings
from irc.errors import Error

from .cublaslt import Enqueue

_NAMES = ("q", "k", "v", "query_lengths", "key_lengths")


class Cudnn:
    """Attention on the current GPU of the thread and one stream; `library` is for tests."""

    def __init__(self, driver: Driver, library: Any = None) -> None:
        self._library = find_library() if library is None else library
        self._driver, self._handle = driver, self._library.create_handle()
        self._graphs: dict[tuple[Any, ...], Any] = {}
        self._workspaces: dict[int, int] = {}  # bytes -> address; earlier graphs use smaller ones

    def close(self) -> None:
        """Release the workspaces; CUDA graphs with calls must not run any more."""
        for address in self._workspaces.values():
            self._driver.free(address)
        self._workspaces.clear()
        self._library.destroy_handle(self._handle)

    def prepare(self, calls: Iterable[LibraryCall]) -> None:
        """Make what the calls need; nothing is captured meanwhile."""
        for call in calls:
            key = (*call.settings.items(), len(call.arguments))
            if key not in self._graphs:
                self._graphs[key] = self._graph(call.settings, len(call.arguments) - 1)
        size = max((g.get_workspace_size() for g in self._graphs.values()), default=0)
        if size > max(self._workspaces, default=0):
            self._workspaces[size] = self._driver.allocate(size)

    def bind(self, call: LibraryCall, addresses: Sequence[int]) -> Enqueue:
        """enqueue(stream) of a call whose arguments lie at `addresses`."""
        self.prepare([call])
        graph = self._graphs[(*call.settings.items(), len(call.arguments))]
        tensors = {number: int(address) for number, address in enumerate(addresses, 1)}
        workspace = self._workspaces.get(max(self._workspaces, default=0), 0)

        def enqueue(stream: int) -> None:
            self._library.set_stream(handle=self._handle, stream=stream)
            graph.execute(tensors, workspace, handle=self._handle)

        return enqueue

    def _graph(self, settings: Settings, reads: int) -> Any:
        """The plan of cuDNN for an attention; an Error where it has none."""
        fe = self._library
        kinds = {"bf16": fe.data_type.BFLOAT16, "f16": fe.data_type.HALF}
        graph = fe.pygraph(
            io_data_type=kinds[str(settings["dtype"])],
            intermediate_data_type=fe.data_type.FLOAT,
            compute_data_type=fe.data_type.FLOAT,
            handle=self._handle,
        )
        layouts = layouts_of(settings)
        tensors = [
            graph.tensor(name=name, dim=dims, stride=strides, uid=number, data_type=kind)
            for number, (name, kind, (dims, strides)) in enumerate(
                zip(_NAMES[:reads], _kinds(fe), layouts[:reads], strict=False), 1
            )
        ]
        options: dict[str, Any] = {"attn_scale": settings["scale"]}
        if settings["causal"]:
            options["diagonal_alignment"] = fe.diagonal_alignment.BOTTOM_RIGHT
            options["diagonal_band_right_bound"] = 0
        if reads > 3:
            options |= {"use_padding_mask": True, "seq_len_q": tensors[3], "seq_len_kv": tensors[4]}
        q, k, v = tensors[:3]
        result, _ = graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=False, **options)
        dims, strides = layouts[-1]
        result.set_output(True).set_dim(dims).set_stride(strides).set_uid(reads + 1)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([fe.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except Exception as error:  # the package's errors have no common base
            raise Error(f"cuDNN has no plan for attention {dict(settings)}: {error}") from error
        return graph


def layouts_of(settings: Settings) -> list[tuple[list[int], list[int]]]:
    """(sizes, strides) of q, k, v, the lengths of queries and keys, and the result, as cuDNN has
    them: [batch, heads, tokens, features]."""
    names = ("batch", "heads", "key_heads", "queries", "keys", "head", "value")
    batch, heads, key_heads, queries, keys, head, value = (int(str(settings[n])) for n in names)
    lay = _by_head if settings["cached"] else _by_token
    lengths = ([batch, 1, 1, 1], [1, 1, 1, 1])
    return [
        _by_token(batch, heads, queries, head),
        lay(batch, key_heads, keys, head),
        lay(batch, key_heads, keys, value),
        lengths,
        lengths,
        _by_token(batch, heads, queries, value),
    ]


def _by_token(batch: int, heads: int, tokens: int, size: int) -> tuple[list[int], list[int]]:
    """The layout of [batch, tokens, heads * size] in memory."""
    return [batch, heads, tokens, size], [tokens * heads * size, size, heads * size, 1]


def _by_head(batch: int, heads: int, tokens: int, size: int) -> tuple[list[int], list[int]]:
    """The layout of [batch, heads, tokens, size] in memory."""
    return [batch, heads, tokens, size], [heads * tokens * size, tokens * size, size, 1]


def _kinds(fe: Any) -> list[Any]:
    """The data types of the operands; None for that of the graph."""
    return [None, None, None, fe.data_type.INT32, fe.data_type.INT32]


def find_library() -> Any:
    """The package cudnn; an Error without it."""
    try:
        import cudnn
    except Exception as error:  # a missing libcudnn is a RuntimeError
        raise Error(
            f"cuDNN is not available ({str(error).splitlines()[0]}): "
            "pip install 'irc-compiler[cudnn]'"
        ) from error
    return cudnn
