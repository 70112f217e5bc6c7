"""The networks of the ranks of one pipeline stage, compared and joined into one function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, cast

from ... import ops
from ...errors import Error
from ...ir.core import Function, Module, Op, Value
from ...source import Loc
from .arrays import ArrayFile
from .leaves import Leaves, is_leaf
from .network import Network, Transfer


class Stage:
    """One function that computes, on every rank, what the network of the rank says.

    `results` holds the joined outputs by name.
    """

    def __init__(
        self, module: Module, arrays: ArrayFile, networks: dict[int, Network], number: int
    ) -> None:
        self.ranks, self.networks = list(networks), list(networks.values())
        self.first, self.number = self.networks[0], number
        self.function = Function("forward")
        self._leaves = Leaves(module, self.function, arrays, networks, number)
        self._joined: list[dict[Value, Value]] = [{} for _ in self.networks]  # per rank
        self._choices: dict[tuple[Op, tuple[int, ...]], Value] = {}
        self._join_inputs()
        self._join_operations()
        self.results = self._join_outputs()

    def transfers(self, kind: Literal["sent", "received"]) -> list[tuple[Transfer, ...]]:
        """What the ranks send or receive: a row per tensor, with an entry per rank."""
        every: list[list[Transfer]] = [getattr(network, kind) for network in self.networks]
        for rank, each in zip(self.ranks, every, strict=True):
            if len(each) != len(every[0]):
                verb = {"sent": "sends", "received": "receives"}[kind]
                raise Error(
                    f"rank {self.ranks[0]} {verb} {len(every[0])} tensors, and rank {rank} "
                    f"{len(each)}; expected as many on every rank of a pipeline stage",
                    loc=(*each, *every[0])[0].loc,
                )
        return list(zip(*every, strict=True))

    def joined(self, values: Sequence[Value], what: str, loc: Loc | None) -> Value:
        """The value that is `values[i]` on rank i; an Error where no one value is."""
        if all(map(is_leaf, values)):
            return self._leaves.value(values, loc)
        first, *others = [known.get(v) for known, v in zip(self._joined, values, strict=True)]
        if first is None or any(each is not first for each in others):
            raise Error(
                f"{what} is another value on some rank; expected the result of the same operation "
                "of the network of every rank",
                loc=loc,
            )
        return first

    def _join_inputs(self) -> None:
        every = dict.fromkeys(name for network in self.networks for name in network.inputs)
        for name in every:
            types = [
                network.inputs[name].type if name in network.inputs else None
                for network in self.networks
            ]
            for rank, type in zip(self.ranks, types, strict=True):
                if type is not types[0] or type is None:
                    raise Error(
                        f"the input {name} is {types[0] or 'missing'} on rank {self.ranks[0]} and "
                        f"{type or 'missing'} on rank {rank}; expected the same on every rank"
                    )
            arg = self.function.add_argument(name, self.first.inputs[name].type)
            for known, network in zip(self._joined, self.networks, strict=True):
                known[network.function.arg(name)] = arg

    def _join_operations(self) -> None:
        lists = [
            [op for op in network.function if not isinstance(op, (ops.Constant, ops.Full))]
            for network in self.networks
        ]
        for row in zip_longest(*lists):
            self._join(list(row))

    def _join(self, row: list[Op]) -> None:
        first = row[0]
        self._check(row, [(type(op), len(op.operands), op.present) if op else None for op in row])
        operands = self._operands(row)
        if isinstance(first, ops.Slice) and _begin_elsewhere(row):
            results = (self._gathered(cast("list[ops.Slice]", row), operands[0]),)
        else:
            self._check(row, [op.attributes for op in row])
            new = first.rebuilt(operands)
            self.function.append(new)
            results = new.results
        for old, value in zip(first.results, results, strict=True):
            value.name = old.name
        for known, op in zip(self._joined, row, strict=True):
            known.update(zip(op.results, results, strict=True))

    def _operands(self, row: list[Op]) -> list[Value]:
        found: list[Value] = []
        for values in zip(*(op.operands for op in row), strict=True):
            if all(map(is_leaf, values)):
                found.append(self._leaves.value(values, row[0].loc))
                continue
            joined = [known.get(v) for known, v in zip(self._joined, values, strict=True)]
            chosen = joined[0] if len({*joined}) == 1 else self._chosen(joined, row[0].loc)
            if chosen is None:
                self._check(row, [None if v is None else id(v) for v in joined])
            found.append(cast("Value", chosen))
        return found

    def _chosen(self, values: list[Value | None], loc: Loc | None) -> Value | None:
        """A result of an operation with several, such as split, by rank; None of other values."""
        maker = values[0].producer if values[0] is not None else None
        if maker is None or any(v is None or v.producer is not maker for v in values):
            return None
        if any(result.type is not maker.results[0].type for result in maker.results):
            return None
        places = tuple(value.index for value in values if value is not None)
        if (maker, places) not in self._choices:
            stacked = self._leaves.add(ops.Stack(list(maker.results)), loc)
            place = self._leaves.start(places, loc)
            self._choices[maker, places] = self._leaves.add(ops.Gather(stacked, place, dim=0), loc)
        return self._choices[maker, places]

    def _check(self, row: list[Op], keys: Sequence[object]) -> None:
        """An Error about the first operation whose key is not that of the first rank."""
        at = next((i for i, key in enumerate(keys) if key != keys[0]), None)
        if at is None:
            return
        places = [op.loc for op in (row[0], row[at]) if op is not None]  # pyright: ignore
        there = f" at {places[0].where()}" if places[0] is not None else ""
        raise Error(
            f"rank {self.ranks[at]} has {_text(row[at])}, and rank {self.ranks[0]} has "
            f"{_text(row[0])}{there}; the ranks of one pipeline stage must build the same network "
            "but for numbers, the starts of slices, parts of a split, and arrays",
            loc=places[-1],
        )

    def _gathered(self, row: list[ops.Slice], x: Value) -> Value:
        """Slices of one size that begin elsewhere on every rank: a gather."""
        first, add, loc = row[0], self._leaves.add, row[0].loc
        places: Value = add(ops.Iota(size=first.result.type.shape[first.dim]), loc)
        if first.step != 1:
            step = add(ops.Constant(values=(first.step,), dtype="i32"), loc)
            places = add(ops.Mul(places, step), loc)
        start = self._leaves.start([cast("int", op.start) for op in row], loc)
        return add(ops.Gather(x, add(ops.Add(places, start), loc), dim=first.dim), loc)

    def _join_outputs(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for rank, network in zip(self.ranks, self.networks, strict=True):
            for name in network.outputs.keys() ^ self.first.outputs.keys():
                raise Error(f"only one of ranks {self.ranks[0]} and {rank} marks the output {name}")
        for name in self.first.outputs:
            values = [network.outputs[name].value for network in self.networks]
            found[name] = self.joined(values, f"the output {name}", None)
        return found


def _begin_elsewhere(row: list[Op]) -> bool:
    """Whether slices are alike but for their start."""
    slices = cast("list[ops.Slice]", row)
    first = slices[0]
    starts = {op.start for op in slices}
    return len(starts) > 1 and all(
        (op.dim, op.step, op.result.type) == (first.dim, first.step, first.result.type)
        and isinstance(op.start, int)
        for op in slices
    )


def _text(op: Op | None) -> str:
    """An operation with its operands and attributes."""
    if op is None:
        return "nothing"
    makers = [
        (f"{name}=" if name in op.present else "")
        + (value.producer.opname if value.producer else f"%{value.name}")
        for name, value in op.named_operands()
    ]
    return f"{op.opname}({', '.join([*makers, *(f'{k}={v}' for k, v in op.attributes.items())])})"
