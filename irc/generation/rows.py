"""`Rows`: the sequences of a batch in a compiled language model, their lengths and caches.

Two signatures are served by the names of their ports: irc's own language models (`positions`,
`past_lengths`, `lengths`, `logit_positions`, caches `k0` [B, heads, C, D]), and networks of
TensorRT-LLM (`position_ids`, `last_token_ids`, `past_key_value_0` [B, 2, heads, C, D], ...), whose
caches are either states of capacity C, or grow by concatenation. Those of TensorRT-LLM may be
packed: their `input_ids` are the tokens of all rows without padding, [T] or [1, T].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Port, Ports, Program, Stream
from ..errors import Error
from ..ir.dims import DimLike
from ..ir.dtypes import numpy_dtype
from ..ir.result_names import NEXT_TOKENS
from .checks import checked
from .inputs import cache_sizes, check_ranges, converted, multiple_of, state_shape

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]


_PAST = "past_key_value"  # the begin of the names of caches
_ADVANCED = ("positions", "past_lengths")  # inputs that grow by one with each token
_MASK = "attention_mask"  # i32 [B, past + S]: 1 for a token, 0 for padding


class Rows:
    """The rows of a batch. `slots` is the capacity of their caches in tokens.

    `extra` are inputs that the caller gives by name. Where rows are `movable`, their caches are
    arrays between steps, as beam search needs.
    """

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        slots: int,
        extra: Mapping[str, Array] | None = None,
        movable: bool = False,
    ) -> None:
        self.program, self.dims = program, dims
        self.prompts, self.slots, self.extra = prompts, slots, dict(extra or {})
        ports = program.ports
        self.growing = [port for port in ports.inputs if port.name.startswith(_PAST)]
        self.inputs = [port for port in ports.inputs if port not in self.growing]
        self.origin = np.arange(len(prompts))  # the row of `extra` that each row has
        self._given: dict[str, tuple[bytes, Array]] = {}  # by name, for an order of rows
        self.past = np.zeros(len(prompts), np.int32)
        self.mask = np.zeros((len(prompts), 0), np.int32)  # 1: a token, 0: padding
        self.caches: Arrays = {port.name: self._zeros(port, 0) for port in self.growing}
        self.stream: Stream | None = None
        if movable:
            self.caches |= {port.name: self._zeros(port, slots) for port in ports.states}
        else:
            self.stream = program.open(cache_sizes(ports.states, self.count, slots))
        _check_names(self.inputs, self.extra)
        (self.ids,) = [port for port in self.inputs if port.name == "input_ids"]
        self.packed, self.row_dim = row_dim(self.ids, self.inputs)
        self._check_extra()
        multiple = multiple_of(self.ids.shape[-1])
        self.multiple = multiple[1] if multiple is not None else 1  # of the tokens of a call
        if multiple is not None and multiple[0] in dims:  # backends pad a call of fewer tokens
            self.dims = {**dims, multiple[0]: (1, *dims[multiple[0]][1:])}
        self._checked: tuple[int, ...] = ()  # the shape of the last call's tokens
        # logits, tokens and width of the last call; no _Call, which would keep these rows alive
        self._all_logits: tuple[Array, Array, int] | None = None
        lengths = {len(prompt) for prompt in prompts}
        if self.growing and len(lengths) > 1 and not any(p.name == _MASK for p in self.inputs):
            raise Error(
                f"this engine has no {_MASK}, which tells padding from tokens, so that all prompts "
                f"of a call must have one length, found {', '.join(map(str, sorted(lengths)))}; "
                "call it with each prompt alone"
            )

    def _check_extra(self) -> None:
        for port in self.inputs:
            given = self.extra.get(port.name)
            if given is None or port.shape[:1] != (self.row_dim,):
                continue
            if given.shape[:1] != (self.count,):
                raise Error(
                    f"{port.name} has the shape {list(given.shape)}; expected a row for each of "
                    f"{self.count} prompts"
                )

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.past)

    def start(self) -> Array:
        """The logits [rows, V] of the token after each prompt.

        With fixed states prompts are computed in calls of as many tokens as the model takes; rows
        that have ended wait for the others.
        """
        longest = most = max(map(len, self.prompts))
        tokens = multiple_of(self.ids.shape[-1])
        if tokens is not None and any(port.fixed for port in self.program.ports.states):
            most = self.dims.get(tokens[0], (1, 1, longest))[2] * self.multiple
        logits = self.step([prompt[:most] for prompt in self.prompts])
        for begin in range(most, longest, most):
            pieces = [prompt[begin : begin + most] for prompt in self.prompts]
            has_tokens = np.array([len(piece) > 0 for piece in pieces])
            logits = np.where(has_tokens[:, None], self.step(pieces), logits)
        return logits

    def step(self, tokens: Sequence[Sequence[int]]) -> Array:
        """The logits [rows, V] of the token after `tokens` of each row, which join its caches."""
        return self._last(*self._call(tokens))

    def next_tokens(self, tokens: Sequence[Sequence[int]], least: int = 0, total: int = 0) -> Array:
        """The most likely token [rows] after `tokens`; the smallest of equally likely ones.

        A call is padded to `least` tokens. The position of padding is the last of the row, or of
        the `total` tokens of its prompt, because a rope may depend on the largest position
        (dynamic, longrope). The next call overwrites the padding in the caches.
        """
        results, call = self._call(tokens, least, total)
        if NEXT_TOKENS in results:
            next_tokens = results[NEXT_TOKENS]
            return next_tokens if next_tokens.ndim == 1 else call.last(next_tokens)
        return self._last(results, call).argmax(-1)

    def ahead(self, token: int, count: int) -> Iterator[Array] | None:
        """The next tokens [rows] after `token` in every row, step by step, at most `count`.

        They come from a stream that feeds each token back on its device. None where the program
        has no such stream, or is not a plain language model that returns the tokens.
        """
        follow = getattr(self.stream, "follow", None)
        names = {port.name for port in self.inputs}
        plain = names <= {"input_ids", *_ADVANCED, "lengths", "logit_positions"} and not self.extra
        if follow is None or not plain or self.multiple > 1 or count < 1:
            return None
        call = _Call(self, [[token]] * self.count, 0, 0)
        inputs = {port.name: call.value(port) for port in self.inputs}
        advanced = [name for name in _ADVANCED if name in names]
        steps = follow(inputs, {"input_ids": NEXT_TOKENS}, advanced, count)
        return None if steps is None else self._followed(steps, inputs)

    def _followed(self, steps: Iterator[Arrays], inputs: Arrays) -> Iterator[Array]:
        for step in steps:
            results = checked(step, inputs)
            self.past = self.past + 1
            yield results[NEXT_TOKENS][:, -1]

    def _call(
        self, tokens: Sequence[Sequence[int]], least: int = 0, total: int = 0
    ) -> tuple[Arrays, _Call]:
        call = _Call(self, tokens, least, total)
        inputs = {port.name: call.value(port) for port in self.inputs}
        if call.ids.shape != self._checked:
            check_ranges(self.inputs, inputs, self.dims)
            self._checked = call.ids.shape
        results = self._run(inputs)
        self.past = self.past + call.counts
        if self.growing:
            self.mask = call.mask
        return results, call

    def select(self, order: Sequence[int]) -> None:
        """Let row i continue what row `order[i]` has done."""
        chosen = np.asarray(order, np.int64)
        self.past, self.mask = self.past[chosen], self.mask[chosen]
        self.origin = self.origin[chosen]
        self.prompts = [self.prompts[at] for at in order]
        self.caches = {name: array[chosen] for name, array in self.caches.items()}

    def _run(self, inputs: Arrays) -> Arrays:
        every = {**inputs, **self.caches}
        stream = self.stream
        results = self.program.run(every) if stream is None else stream.step(every)
        results = checked(results, inputs)
        for name in self.caches:
            result = name if name in results else name.replace("past_", "present_")
            if result not in results:
                outputs = ", ".join(results)
                raise Error(f"the engine returns no {result} for {name}, only {outputs}")
            self.caches[name] = results.pop(result)
        return results

    def _last(self, results: Arrays, call: _Call) -> Array:
        if "logits" not in results:
            raise Error(
                f"the engine returns no logits, only {', '.join(results) or 'nothing'}; mark them "
                "as an output, and compile without --next-tokens"
            )
        logits = results["logits"]
        self._all_logits = logits, call.counts, call.width
        return call.last(logits) if self.packed or logits.ndim == 3 else logits

    def logits_of_tokens(self) -> list[Array] | None:
        """[tokens, V] of the last call for each row, where the program returns all logits."""
        if self._all_logits is None:
            return None
        logits, counts, width = self._all_logits
        if self.packed:
            logits = logits.reshape(-1, logits.shape[-1])
            ends = np.cumsum(counts)
            return np.split(logits, ends[:-1]) if len(logits) == ends[-1] else None
        if logits.ndim != 3 or logits.shape[1] != width:
            return None
        return [row[:count] for row, count in zip(logits, counts, strict=True)]

    def given(self, port: Port) -> Array:
        """The array in `extra` for an input, row by row.

        It is read-only and the same in all calls while the order of rows is: backends need not
        copy it again.
        """
        order = self.origin.tobytes()
        held = self._given.get(port.name)
        if held is None or held[0] != order:
            array = self.extra[port.name]
            if port.shape[:1] == (self.row_dim,):  # an entry per row
                array = array[self.origin]
            array = array.reshape(array.shape + (1,) * (len(port.shape) - array.ndim))
            array = np.array(converted(port, array), order="C")
            array.flags.writeable = False
            held = self._given[port.name] = order, array
        return held[1]

    def _zeros(self, port: Port, slots: int) -> Array:
        return np.zeros(state_shape(port, self.count, slots), numpy_dtype(port.dtype))


class _Call:
    """One call: the tokens of every row, padded to the longest, and what follows from them."""

    def __init__(self, rows: Rows, tokens: Sequence[Sequence[int]], least: int, total: int) -> None:
        self.rows, self.total = rows, total
        counts = [len(row_tokens) for row_tokens in tokens]
        width = -(-max(*counts, least) // rows.multiple) * rows.multiple
        self.counts, self.width = np.array(counts, np.int32), width
        self.ids = np.zeros((len(tokens), width), np.int64)
        for row, row_tokens in enumerate(tokens):
            self.ids[row, : len(row_tokens)] = row_tokens

    @cached_property
    def valid(self) -> Array:
        """[rows, width]: 1 for a token, 0 for padding."""
        return (np.arange(self.ids.shape[1]) < self.counts[:, None]).astype(np.int32)

    @cached_property
    def mask(self) -> Array:
        """[rows, past + width]: `valid` behind that of the calls before."""
        return np.concatenate([self.rows.mask, self.valid], 1)

    def positions(self) -> Array:
        """[rows, width]; see `Rows.next_tokens` for those of padding."""
        past, count = self.rows.past[:, None], self.ids.shape[1]
        at = past + np.arange(count, dtype=np.int32)
        if self.counts.min() == count:
            return at
        end = np.maximum(past + self.counts[:, None], self.total)
        return np.where(self.valid, at, end - 1)

    def value(self, port: Port) -> Array:
        """The array for an input, by its name."""
        given = self.rows.extra.get(port.name)
        if given is not None and port.shape == self.rows.ids.shape and self.rows.packed:
            rows = given[self.rows.origin].reshape(-1, 1)
            return converted(port, self.joined(rows.repeat(self.width, 1)))  # an entry per token
        if given is not None:
            return self.rows.given(port)
        base = port.name.rstrip("0123456789").rstrip("_")
        return converted(port, _VALUES[base](self, port))

    def joined(self, values: Array) -> Array:
        """[rows, width], or in the packed form the values of the tokens alone."""
        if not self.rows.packed:
            return values
        tokens = values[self.valid > 0]
        return tokens[None] if len(self.rows.ids.shape) == 2 else tokens

    def ends(self) -> Array:
        """[rows]: the number of tokens of this call up to the last of each row, or of its row."""
        return np.cumsum(self.counts) if self.rows.packed else self.counts

    def prompts(self) -> Array:
        """The lengths of the prompts."""
        return np.array([len(prompt) for prompt in self.rows.prompts])

    def whole(self, port: Port, value: int) -> Array:
        """An array of one value whose symbols are the rows, and the capacity behind them."""
        sizes = (self.rows.slots if at else self.rows.count for at in range(len(port.shape)))
        pairs = zip(port.shape, sizes, strict=True)
        return np.full([dim if isinstance(dim, int) else size for dim, size in pairs], value)

    def last(self, values: Array) -> Array:
        """[rows, ...] at the last token of each row, of values [rows, tokens or 1, ...].

        Values of a packed call are [rows, V], or those of all tokens, [T, V] or [1, T, V].
        """
        if self.rows.packed:
            flat = values.reshape(-1, values.shape[-1])
            return flat if len(flat) == len(self.counts) else flat[self.ends() - 1]
        at = np.zeros(len(values), np.int64) if values.shape[1] == 1 else self.counts - 1
        return values[np.arange(len(values)), at]


_Value: TypeAlias = Callable[[_Call, Port], Array]
_VALUES: dict[str, _Value] = {
    "input_ids": lambda call, port: call.joined(call.ids),
    "position_ids": lambda call, port: call.joined(call.positions()),
    "positions": lambda call, port: call.positions(),
    "last_token_ids": lambda call, port: call.ends(),
    "logit_positions": lambda call, port: np.maximum(call.counts[:, None] - 1, 0),
    "past_lengths": lambda call, port: call.rows.past,
    "lengths": lambda call, port: call.counts,
    "host_past_key_value_lengths": lambda call, port: call.rows.past,
    "sequence_length": lambda call, port: call.rows.past + call.counts,
    "context_lengths": lambda call, port: call.prompts(),
    "host_context_lengths": lambda call, port: call.prompts(),
    "host_request_types": lambda call, port: call.whole(port, int(call.rows.past.any())),
    _MASK: lambda call, port: call.mask if call.rows.growing else call.valid,
    "host_max_attention_window_sizes": lambda call, port: call.whole(port, call.rows.slots),
    "host_max_attention_window_size": lambda call, port: call.whole(port, call.rows.slots),
    "host_sink_token_length": lambda call, port: call.whole(port, 0),
    "host_runtime_perf_knobs": lambda call, port: call.whole(port, -1),
    "host_context_progress": lambda call, port: call.whole(port, 0),
    "cache_indirection": lambda call, port: call.whole(port, 0),
    "all_reduce_workspace": lambda call, port: call.whole(port, 0),
    "tasks": lambda call, port: call.whole(port, 0),
}


def row_dim(ids: Port, inputs: Sequence[Port]) -> tuple[bool, DimLike]:
    """Whether `input_ids` are packed, and the dimension of the rows of a batch."""
    if len(ids.shape) == 1 or ids.shape[0] == 1:
        for port in inputs:
            if port.name in ("context_lengths", "last_token_ids", "host_request_types"):
                return len(ids.shape) == 1 or port.shape[0] != 1, port.shape[0]
    return False, ids.shape[0]


def _check_names(ports: Sequence[Port], extra: Mapping[str, Array]) -> None:
    """An Error that names the inputs that neither the caller nor the runtime gives."""
    names = [port.name for port in ports]
    unknown = [
        name
        for name in names
        if name not in extra and name.rstrip("0123456789").rstrip("_") not in _VALUES
    ]
    if unknown:
        raise Error(
            f"generation has no value for {', '.join(unknown)}; use irc run, or give arrays by "
            "name, as in Model.generate_batch(..., extra={...})"
        )


def has_engine_tensors(ports: Ports) -> bool:
    """Whether a language model has the inputs of networks of TensorRT-LLM, not those of irc."""
    return any(port.name.startswith(_PAST) for port in (*ports.inputs, *ports.states))


def check_language_model(ports: Ports, caches: bool = True) -> None:
    """An Error unless a program has the input `input_ids`, and logits or next tokens.

    It must also have `caches`, without which it predicts one token.
    """
    inputs, outputs = ([port.name for port in of_kind] for of_kind in (ports.inputs, ports.outputs))
    has_tokens = "logits" in outputs or NEXT_TOKENS in outputs
    has_caches = ports.states or not caches or has_engine_tensors(ports)
    if "input_ids" not in inputs or not has_tokens or not has_caches:
        raise Error(
            "this model is not a language model, which has the input input_ids, caches, and the "
            f"output logits: its inputs are {', '.join(inputs) or 'none'} and its outputs "
            f"{', '.join(outputs) or 'none'}; use irc run"
        )
