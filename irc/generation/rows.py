"""`Rows`: the sequences of a batch in a compiled language model, their lengths and caches.

Two signatures are served by the names of their ports: irc's own language models (`positions`,
`past_lengths`, `lengths`, `logit_positions`, caches `k0` [B, heads, C, D]), and networks of
TensorRT-LLM (`position_ids`, `last_token_ids`, `past_key_value_0` [B, 2, heads, C, D], ...), whose
caches are either states of capacity C, or grow by concatenation. Those of TensorRT-LLM may be
packed: their `input_ids` are the tokens of all rows without padding, [T] or [1, T].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Port, Ports, Program, Stream
from ..errors import Error
from ..ir.core import Module
from ..ir.dims import DimLike
from ..ir.dtypes import numpy_dtype
from ..ir.result_names import NEXT_TOKENS
from ..ops import Rope
from .checks import checked
from .inputs import cache_sizes, check_ranges, converted, multiple_of, state_shape
from .pages import PAGES, PagePool, RowPages, layout

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]
Tokens: TypeAlias = Sequence[Sequence[int]]  # of each row


_PAST = "past_key_value"  # the begin of the names of caches
_ADVANCED = ("positions", "past_lengths")  # inputs that grow by one with each token
_STEADY = ("lengths", "logit_positions", PAGES)  # inputs that stay the same
_MASK = "attention_mask"  # i32 [B, past + S]: 1 for a token, 0 for padding


class Rows:
    """The rows of a batch: sequences with their caches, which have room for `slots` tokens.

    Each of `prompts` has `width` rows beside each other. `extra` are inputs that the caller gives
    by name, with an entry for each prompt. `module` gives the module of the program: it is called
    for a prompt in pieces, since a rope may depend on its length. Where the caches are pools of
    pages, rows take theirs from `pool` as they grow, by default from one for these rows alone.
    """

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Any],
        prompts: Tokens,
        slots: int,
        extra: Mapping[str, Array] | None = None,
        width: int = 1,
        module: Callable[[], Module] | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self.program, self.dims, self.width, self.module = program, dims, width, module
        self.prompts, self.slots, self.extra = prompts, slots, dict(extra or {})
        ports = program.ports
        self.growing = [port for port in ports.inputs if port.name.startswith(_PAST)]
        self.inputs = [port for port in ports.inputs if port not in self.growing]
        self.origin = np.arange(len(prompts)).repeat(width)  # the entry of `extra` of each row
        self._given: dict[str, tuple[bytes, Array]] = {}  # by name, for an order of rows
        self._past = np.zeros(len(self.origin), np.int32)
        lengths = [len(prompt) for prompt in prompts]
        self.prompt_lengths = np.array(lengths, np.int32).repeat(width)
        self.mask = np.zeros((self.count, 0), np.int32)  # 1: a token, 0: padding
        self.caches: Arrays = {port.name: self._zeros(port, 0) for port in self.growing}
        self.pages: RowPages | None = None
        paged = layout(ports)
        if paged is None and pool is None:
            self.sizes = cache_sizes(ports.states, self.count, slots)
            self.stream: Stream = program.open(self.sizes)
        else:
            tokens = 0 if paged is None else self.count * paged.pages(slots) * paged.size
            pool = pool or PagePool(program, tokens)
            self.sizes, self.stream = pool.sizes, pool.stream
            self.pages = RowPages(pool, self.count)
            weakref.finalize(self, self.pages.close)
        _check_names(self.inputs, self.extra)
        names = [port.name for port in self.inputs if port.name not in self.extra]
        self.values = {name: _VALUES[_base(name)] for name in names}
        self.kinds = {port.name: numpy_dtype(port.dtype) for port in self.inputs}
        (self.ids,) = [port for port in self.inputs if port.name == "input_ids"]
        self.packed, self.row_dim = row_dim(self.ids, self.inputs)
        shared = multiple_of(self.row_dim)
        # whether a call takes all rows: caches are arrays, or ranks share the rows
        self.together = bool(self.growing) or shared is None or shared[1] > 1
        self._check_extra()
        symbol, self.multiple = multiple_of(self.ids.shape[-1]) or ("", 1)  # tokens of a call
        self.longest = 1 << 31  # tokens of a call
        if symbol in dims:
            # inputs of TensorRT-LLM tell prompts from single tokens
            if not has_engine_tensors(ports) or any(port.fixed for port in ports.states):
                self.longest = int(dims[symbol][2]) * self.multiple
            self.dims = {**dims, symbol: (1, *dims[symbol][1:])}  # backends pad a shorter call
        self._checked: set[tuple[int, ...]] = set()  # the shapes of the tokens of calls
        # logits, tokens and width of the last call; no _Call, which would keep these rows alive
        self._all_logits: tuple[Array, Array, int] | None = None
        if self.growing and len({*lengths}) > 1 and not any(p.name == _MASK for p in self.inputs):
            raise Error(
                f"this engine has no {_MASK}, which tells padding from tokens, so that all prompts "
                f"of a call must have one length, found {', '.join(map(str, sorted({*lengths})))}; "
                "call it with each prompt alone"
            )

    @classmethod
    def empty(
        cls,
        program: Program,
        dims: Mapping[str, Any],
        count: int,
        capacity: int,
        pool: PagePool | None = None,
    ) -> Rows:
        """`count` rows without tokens, with room for `capacity` tokens each."""
        return cls(program, dims, [()] * count, capacity, pool=pool)

    def _check_extra(self) -> None:
        for port in self.inputs:
            given = self.extra.get(port.name)
            if given is None or port.shape[:1] != (self.row_dim,):
                continue
            if given.shape[:1] != (len(self.prompts),):
                raise Error(
                    f"{port.name} has the shape {list(given.shape)}; expected a row for each of "
                    f"{len(self.prompts)} prompts"
                )

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._past)

    @property
    def past(self) -> Array:
        """i32 [rows]: how many tokens each row has; setting fewer forgets the last ones."""
        past = self._past.view()
        past.flags.writeable = False
        return past

    @past.setter
    def past(self, past: Array) -> None:
        new = np.array(past, np.int32)
        if not (self.can_roll_back and (new >= 0).all() and (new <= self._past).all()):
            raise Error(
                f"expected at most {self._past.tolist()} tokens of the rows, and no fixed state as "
                f"that of a recurrence, which forgets none, found {new.tolist()}"
            )
        self._past = new
        if self.pages is not None:
            for row, count in enumerate(new.tolist()):
                self.pages.clear([row], count)

    @property
    def can_roll_back(self) -> bool:
        """Whether the last tokens of a row can be forgotten."""
        return not self.growing and not any(port.fixed for port in self.program.ports.states)

    def start(self) -> Array:
        """The logits [rows, V] of the token after the prompt of each row."""
        if self.width == 1 or self.together:
            return self.feed([self.prompts[at] for at in self.origin.tolist()])
        order, prompts = self.origin.tolist(), len(self.prompts)
        self.origin[:prompts] = np.arange(prompts)
        self.prompt_lengths[:prompts] = [len(prompt) for prompt in self.prompts]
        logits = self.feed(self.prompts)
        self.copy(order, range(self.count))
        return logits.repeat(self.width, 0)

    def feed(self, tokens: Tokens, first: int = 0) -> Array:
        """As `step`, in calls of as many tokens as the model takes; rows that have ended wait."""
        return self._fed(tokens, first, self._last)

    def _fed(self, tokens: Tokens, first: int, taken: Callable[[Arrays, _Call], Array]) -> Array:
        """What `taken` makes of the results of the last call with tokens of each row."""
        longest = max(map(len, tokens))
        if longest <= self.longest:
            return taken(*self._call(tokens, first))
        past = self._past[first : first + len(tokens)]
        piece, total = self._piece(int((past + np.array([*map(len, tokens)])).max()))
        values = np.zeros(0)
        for begin in range(0, longest, piece):
            pieces = [row_tokens[begin : begin + piece] for row_tokens in tokens]
            least = self.longest if total and begin + piece < longest else 0
            new = taken(*self._call(pieces, first, least, total))
            has_tokens = np.array([len(row_piece) > 0 for row_piece in pieces])
            has_tokens = has_tokens.reshape(-1, *[1] * (new.ndim - 1))
            values = np.where(has_tokens, new, values) if begin else new
        return values

    def _piece(self, total: int) -> tuple[int, int]:
        """The tokens of a piece of a sequence, and its length where padding must tell it."""
        if self.module is None or not _by_length(self.module(), total):
            return self.longest, 0
        if self.longest == self.multiple:
            raise Error(
                f"the prompt has {total} tokens, but a call takes {self.longest}, and the rope of "
                "this model depends on the length of the prompt, for which a call needs padding; "
                f"compile with a larger --dims S=min:typical:max, at best max={total}"
            )
        return self.longest - self.multiple, total

    def step(self, tokens: Tokens, first: int = 0) -> Array:
        """The logits [rows, V] after `tokens`, which join rows `first`, `first + 1`, ..."""
        return self._last(*self._call(tokens, first))

    def step_all(self, tokens: Tokens, first: int = 0) -> list[Array]:
        """As `step`, with the logits [tokens, V] after each of the tokens of a row."""
        results, call = self._call(tokens, first, every=True)
        self._last(results, call)
        logits = self.logits_of_tokens()
        if logits is None:
            raise Error("this program returns the logits of the last token of a call only")
        return logits

    def next_tokens(self, tokens: Tokens, first: int = 0) -> Array:
        """The most likely token [rows] after `tokens`, fed as by `feed`; of equally likely ones
        the smallest."""
        return self._fed(tokens, first, self._most_likely)

    def _most_likely(self, results: Arrays, call: _Call) -> Array:
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
        plain = names <= {"input_ids", *_ADVANCED, *_STEADY} and not self.extra
        if follow is None or not plain or self.multiple > 1 or count < 1:
            return None
        if self.pages is not None:
            try:
                self.pages.write(0, self._past, np.full(self.count, count))
            except Error:  # step by step, as far as there are pages
                return None
        call = _Call(self, [[token]] * self.count)
        inputs = {port.name: call.value(port) for port in self.inputs}
        advanced = [name for name in _ADVANCED if name in names]
        steps = follow(inputs, {"input_ids": NEXT_TOKENS}, advanced, count)
        return None if steps is None else self._followed(steps, inputs)

    def _followed(self, steps: Iterator[Arrays], inputs: Arrays) -> Iterator[Array]:
        for step in steps:
            results = checked(step, inputs)
            self._past = self._past + 1
            yield results[NEXT_TOKENS][:, -1]

    def _call(
        self, tokens: Tokens, first: int, least: int = 0, total: int = 0, every: bool = False
    ) -> tuple[Arrays, _Call]:
        count = len(tokens)
        if not 0 <= first <= self.count - count or not count:
            raise Error(f"expected some of rows 0 to {self.count - 1}, found {count} from {first}")
        if self.together and count != self.count:
            raise Error(
                f"a call of this program takes all {self.count} rows, found {count}: its caches "
                "grow, or ranks share the rows (dp)"
            )
        call = _Call(self, tokens, first, least, total, every)
        if self.pages is not None:
            self.pages.write(first, call.past, call.counts)
            first = 0  # of the pool, which has no rows
        inputs = {port.name: call.value(port) for port in self.inputs}
        if call.key not in self._checked:
            check_ranges(self.inputs, inputs, self.dims)
            self._checked.add(call.key)
        results = self._run(inputs, first)
        past = self._past.copy()
        past[call.rows] += call.counts
        self._past = past
        if self.growing:
            self.mask = call.mask
        return results, call

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let row `targets[i]` continue what row `sources[i]` has done before the call."""
        moves = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moves:
            return
        old, new = (list(rows) for rows in zip(*moves, strict=True))
        grown = [self.mask, *self.caches.values()] if self.growing else []
        for array in (self._past, self.prompt_lengths, self.origin, *grown):
            array[new] = array[old]
        if self.pages is not None:
            self.pages.copy(old, new)
        elif self.program.ports.states:
            self.stream.copy_rows(old, new)

    def clear(self, rows: Sequence[int]) -> None:
        """Let rows begin again without tokens."""
        if self.growing:
            raise Error("rows of growing caches cannot be cleared")
        self._past[list(rows)] = self.prompt_lengths[list(rows)] = 0
        if self.pages is not None:
            self.pages.clear(rows)
        else:
            self.stream.clear_rows(rows)

    def _run(self, inputs: Arrays, first: int) -> Arrays:
        results = checked(self.stream.step({**inputs, **self.caches}, first), inputs)
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

    def given(self, port: Port, rows: slice) -> Array:
        """The array in `extra` for an input, row by row.

        It is read-only and the same in all calls while the order of rows is: backends need not
        copy it again.
        """
        origin = self.origin[rows]
        order = origin.tobytes()
        held = self._given.get(port.name)
        if held is None or held[0] != order:
            array = self.extra[port.name]
            if port.shape[:1] == (self.row_dim,):  # an entry per row
                array = array[origin]
            array = array.reshape(array.shape + (1,) * (len(port.shape) - array.ndim))
            array = np.array(converted(port, array), order="C")
            array.flags.writeable = False
            held = self._given[port.name] = order, array
        return held[1]

    def _zeros(self, port: Port, slots: int) -> Array:
        return np.zeros(state_shape(port, self.count, slots), numpy_dtype(port.dtype))


class _Call:
    """One call: the tokens of its rows, padded to the longest, and what follows from them."""

    def __init__(
        self,
        batch: Rows,
        tokens: Tokens,
        first: int = 0,
        least: int = 0,
        total: int = 0,
        every: bool = False,
    ) -> None:
        self.batch, self.total, self.every = batch, total, every
        self.rows = slice(first, first + len(tokens))
        self.past = batch.past[self.rows]
        counts = [*map(len, tokens)]
        width = -(-max(*counts, least) // batch.multiple) * batch.multiple
        self.counts, self.width = np.array(counts, np.int32), width
        self.is_padded = min(counts) < width
        try:
            self.ids = np.zeros((len(tokens), width), numpy_dtype(batch.ids.dtype))
            for row, row_tokens in enumerate(tokens if self.is_padded else ()):
                self.ids[row, : len(row_tokens)] = row_tokens
            if not self.is_padded:
                self.ids[:] = tokens
        except OverflowError:
            raise Error(f"a token is outside the range of {batch.ids.dtype}") from None
        self.key = *self.ids.shape, every  # calls of one key have inputs of the same shapes

    @cached_property
    def valid(self) -> Array:
        """[rows, width]: 1 for a token, 0 for padding."""
        return (np.arange(self.ids.shape[1]) < self.counts[:, None]).astype(np.int32)

    @cached_property
    def mask(self) -> Array:
        """[rows, past + width]: `valid` behind that of the calls before."""
        return np.concatenate([self.batch.mask, self.valid], 1)

    def positions(self) -> Array:
        """[rows, width].

        The position of padding is the last of the row, or of the `total` tokens of its prompt,
        because a rope may depend on the largest position (dynamic, longrope).
        """
        past = self.past[:, None]
        if self.width == 1 and not self.is_padded:
            return past
        at = past + np.arange(self.width, dtype=np.int32)
        if not self.is_padded:
            return at
        end = np.maximum(past + self.counts[:, None], self.total)
        return np.where(self.valid, at, end - 1)

    def value(self, port: Port) -> Array:
        """The array for an input, by its name."""
        batch = self.batch
        make = batch.values.get(port.name)
        if make is not None:
            array = make(self, port)
            return array if array.dtype == batch.kinds[port.name] else converted(port, array)
        given = batch.extra[port.name]
        if port.shape == batch.ids.shape and batch.packed:
            rows = given[batch.origin[self.rows]].reshape(-1, 1)
            return converted(port, self.joined(rows.repeat(self.width, 1)))  # an entry per token
        return batch.given(port, self.rows)

    def joined(self, values: Array) -> Array:
        """[rows, width], or in the packed form the values of the tokens alone."""
        if not self.batch.packed:
            return values
        tokens = values[self.valid > 0]
        return tokens[None] if len(self.batch.ids.shape) == 2 else tokens

    def pages(self) -> Array:
        """[rows, N]: the pages of the rows."""
        if self.batch.pages is None:
            raise Error("the input pages is for caches in pages; compile with --page-caches")
        return self.batch.pages.table[self.rows].copy()

    def logit_positions(self) -> Array:
        """[rows, 1 or width]: the tokens whose logits are computed."""
        if self.every:
            return np.tile(np.arange(self.width, dtype=np.int32), (len(self.counts), 1))
        return np.maximum(self.counts[:, None] - 1, 0)

    def ends(self) -> Array:
        """[rows]: the number of tokens of this call up to the last of each row, or of its row."""
        return np.cumsum(self.counts) if self.batch.packed else self.counts

    def prompts(self) -> Array:
        """The lengths of the prompts, by default the tokens of the first call of a row."""
        lengths = self.batch.prompt_lengths[self.rows]
        lengths[lengths == 0] = self.counts[lengths == 0]
        return lengths.copy()

    def whole(self, port: Port, value: int) -> Array:
        """An array of one value whose symbols are the rows, and the capacity behind them."""
        sizes = (self.batch.slots if at else len(self.counts) for at in range(len(port.shape)))
        pairs = zip(port.shape, sizes, strict=True)
        return np.full([dim if isinstance(dim, int) else size for dim, size in pairs], value)

    def last(self, values: Array) -> Array:
        """[rows, ...] at the last token of each row, of values [rows, tokens or 1, ...].

        Values of a packed call are [rows, V], or those of all tokens, [T, V] or [1, T, V].
        """
        if self.batch.packed:
            flat = values.reshape(-1, values.shape[-1])
            return flat if len(flat) == len(self.counts) else flat[self.ends() - 1]
        if values.shape[1] == 1:
            return values[:, 0]
        return values[np.arange(len(values)), self.counts - 1]


_Value: TypeAlias = Callable[[_Call, Port], Array]
_VALUES: dict[str, _Value] = {
    "input_ids": lambda call, port: call.joined(call.ids),
    "position_ids": lambda call, port: call.joined(call.positions()),
    "positions": lambda call, port: call.positions(),
    "last_token_ids": lambda call, port: call.ends(),
    "logit_positions": lambda call, port: call.logit_positions(),
    PAGES: lambda call, port: call.pages(),
    "past_lengths": lambda call, port: call.past,
    "lengths": lambda call, port: call.counts,
    "host_past_key_value_lengths": lambda call, port: call.past,
    "sequence_length": lambda call, port: call.past + call.counts,
    "context_lengths": lambda call, port: call.prompts(),
    "host_context_lengths": lambda call, port: call.prompts(),
    "host_request_types": lambda call, port: call.whole(port, int(call.past.any())),
    _MASK: lambda call, port: call.mask if call.batch.growing else call.valid,
    "host_max_attention_window_sizes": lambda call, port: call.whole(port, call.batch.slots),
    "host_max_attention_window_size": lambda call, port: call.whole(port, call.batch.slots),
    "host_sink_token_length": lambda call, port: call.whole(port, 0),
    "host_runtime_perf_knobs": lambda call, port: call.whole(port, -1),
    "host_context_progress": lambda call, port: call.whole(port, 0),
    "cache_indirection": lambda call, port: call.whole(port, 0),
    "all_reduce_workspace": lambda call, port: call.whole(port, 0),
    "tasks": lambda call, port: call.whole(port, 0),
}


def _by_length(module: Module, length: int) -> bool:
    """Whether a rope of the module turns a sequence of this length otherwise than its pieces."""
    ropes = [op for op in module.ops() if isinstance(op, Rope)]
    return any(rope.by_length and rope.original_positions < length for rope in ropes)


def row_dim(ids: Port, inputs: Sequence[Port]) -> tuple[bool, DimLike]:
    """Whether `input_ids` are packed, and the dimension of the rows of a batch."""
    if len(ids.shape) == 1 or ids.shape[0] == 1:
        for port in inputs:
            if port.name in ("context_lengths", "last_token_ids", "host_request_types"):
                return len(ids.shape) == 1 or port.shape[0] != 1, port.shape[0]
    return False, ids.shape[0]


def _base(name: str) -> str:
    """The name of an input without the number of its layer."""
    return name.rstrip("0123456789").rstrip("_")


def _check_names(ports: Sequence[Port], extra: Mapping[str, Array]) -> None:
    """An Error that names the inputs that neither the caller nor the runtime gives."""
    names = [port.name for port in ports]
    unknown = [name for name in names if name not in extra and _base(name) not in _VALUES]
    if unknown:
        raise Error(
            f"generation has no value for {', '.join(unknown)}; use irc run, or give arrays by "
            "name, as in Model.completions(..., extra={...}); what an encoder returns comes from "
            "irc generate --encoder DIR"
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
