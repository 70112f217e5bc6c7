"""GRU, LSTM and RNN, unrolled: a sequence of a known length, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import Made, only, reads
from irc.ir.core import Op
from irc.ir.dims import DimLike, Shape

_MOST = 1024  # steps
_ACTIVATIONS: dict[str, type[Op]] = {"Sigmoid": ops.Sigmoid, "Tanh": ops.Tanh, "Relu": ops.Relu}
_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_DEFAULT = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"], "RNN": ["Tanh"]}
_KNOWN = "activations direction hidden_size layout"


@reads("RNN", known=_KNOWN)
@reads("GRU", known=f"{_KNOWN} linear_before_reset")
@reads("LSTM", known=f"{_KNOWN} input_forget", refuses=only("input_forget", 0))
def recurrent(b: Builder, node: Node) -> Made:
    """All states [steps, directions, batch, hidden], and the last ones."""
    x, weights = node.shaped(0, 3, 3), node.shaped(1, 3, 3)
    if node.integer("layout", 0):
        x = b.op(ops.Transpose, x, order=(1, 0, 2))
    steps, batch = x.shape[:2]
    if not isinstance(steps, int) or not 0 < steps <= _MOST:
        raise Error(
            f"{node.kind} over {steps} steps: irc unrolls recurrences of 1 to {_MOST} steps; "
            "export the model with a sequence length that is a number"
        )
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    turned = ways.get(node.text("direction", "forward"), [])
    gates, hidden = _GATES[node.kind], node.shaped(2, 3, 3).shape[2]
    if weights.shape[:2] != (len(turned), gates * hidden):
        raise Error(f"{node.kind} has weights {list(weights.shape)} for {len(turned)} directions")
    kept = _kept(b, node, steps)
    wide = (len(turned), batch, hidden)
    states = [_state(b, node, i, x.dtype, wide) for i in ((5, 6) if node.kind == "LSTM" else (5,))]
    all_steps: list[Entry] = []
    last: list[list[Entry]] = []
    for way, backwards in enumerate(turned):
        run = _Direction(b, node, way, hidden)
        mine = [run.part(state) for state in states]
        inputs = b.add(ops.Split(b.get(run.inputs(x)), dim=0, sizes=(1,) * steps)).results
        shown: list[Entry] = []
        for t in reversed(range(steps)) if backwards else range(steps):
            given = b.entry(b.reshaped(inputs[t], (batch, gates * hidden)))
            new = run.step(given, *mine)
            if kept is None:
                shown.append(new[0])
            else:
                shown.append(b.where(kept[t], new[0], 0.0))
                new = [b.where(kept[t], n, old) for n, old in zip(new, mine, strict=True)]
            mine = new
        all_steps.append(_stacked(b, shown[::-1] if backwards else shown, 0))
        last.append(mine)
    results = [
        _stacked(b, all_steps, 1),
        *(_stacked(b, state, 0) for state in zip(*last, strict=True)),
    ]
    if node.integer("layout", 0):
        orders = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
        pairs = zip(results, orders, strict=False)
        results = [b.op(ops.Transpose, result, order=order) for result, order in pairs]
    return results[: len(node.outputs)]


def _stacked(b: Builder, entries: Sequence[Entry], dim: int) -> Entry:
    return b.entry(b.value(ops.Stack([b.get(entry) for entry in entries], dim=dim)))


def _kept(b: Builder, node: Node, steps: int) -> list[Entry] | None:
    """For each step, which rows [batch, 1] are that long; None where all are."""
    lengths = node.optional(4)
    content = content_of(lengths)
    if lengths is None or (content is not None and all(n == steps for n in content.flat)):
        return None
    column = b.op(ops.Unsqueeze, lengths, dims=(1,))
    return [b.op(ops.Gt, column, t) for t in range(steps)]


def _state(b: Builder, node: Node, at: int, dtype: str, shape: Shape) -> Entry:
    """An initial state [directions, batch, hidden]."""
    state = node.optional(at)
    if state is None:
        return b.entry(b.value(ops.Full(value=0.0, shape=shape, dtype=dtype)))
    return b.op(ops.Transpose, state, order=(1, 0, 2)) if node.integer("layout", 0) else state


class _Direction:
    """The weights of one direction, and a step with them."""

    def __init__(self, b: Builder, node: Node, way: int, hidden: DimLike) -> None:
        self.b, self.node, self.way, self.hidden = b, node, way, hidden
        self.gates = _GATES[node.kind]
        self.weight, self.recurrence = self.part(node.input(1)), self.part(node.input(2))
        bias, peephole = node.optional(3), node.optional(7)
        self.biases = None if bias is None else self.split(self.part(bias), 2 * self.gates)
        self.peephole = None if peephole is None else self.split(self.part(peephole), 3)
        names = node.attributes.get("activations") or _DEFAULT[node.kind] * (way + 1)
        count = len(_DEFAULT[node.kind])
        mine = names[way * count : (way + 1) * count]
        if len(mine) != count or any(name not in _ACTIVATIONS for name in mine):
            raise Error(f"{node.kind} with activations {', '.join(names)}")
        self.acts = [_ACTIVATIONS[name] for name in mine]

    def part(self, x: Entry) -> Entry:
        """What belongs to this direction."""
        one = self.b.op(ops.Slice, x, dim=0, start=self.way, stop=self.way + 1)
        return self.b.entry(self.b.reshaped(self.b.get(one), x.shape[1:]))

    def split(self, x: Entry, count: int) -> list[Entry]:
        """Equal parts of the last dimension."""
        sizes = (self.hidden,) * count
        parts = self.b.add(ops.Split(self.b.get(x), dim=-1, sizes=sizes)).results
        return [self.b.entry(part) for part in parts]

    def inputs(self, x: Entry) -> Entry:
        """What the inputs of all steps add to the gates: [steps, batch, gates * hidden].

        The biases of the recurrence are in it too, but for the one that GRU multiplies.
        """
        b, bias = self.b, self.biases
        product = b.op(ops.Linear, x, self.weight)
        if bias is None:
            return product
        sums = [b.op(ops.Add, *pair) for pair in zip(bias, bias[self.gates :], strict=False)]
        if self._resets_last:
            sums[2] = bias[2]
        return b.op(ops.Add, product, b.value(ops.Concat([b.get(bias) for bias in sums], dim=0)))

    @property
    def _resets_last(self) -> bool:
        return bool(self.node.kind == "GRU" and self.node.integer("linear_before_reset", 0))

    def step(self, given: Entry, h: Entry, c: Entry | None = None) -> list[Entry]:
        """The states after a step."""
        b = self.b
        if self.node.kind == "GRU":
            return [self._gru(given, h)]
        total = b.op(ops.Add, given, b.op(ops.Linear, h, self.recurrence))
        if c is None:
            return [b.op(self.acts[0], total)]
        first, second, third = self.acts
        i, o, f, new = self.split(total, 4)
        p = self.peephole
        if p is not None:
            i = b.op(ops.Add, i, b.op(ops.Mul, c, p[0]))
            f = b.op(ops.Add, f, b.op(ops.Mul, c, p[2]))
        new = b.op(ops.Mul, b.op(first, i), b.op(second, new))
        c = b.op(ops.Add, b.op(ops.Mul, b.op(first, f), c), new)
        if p is not None:
            o = b.op(ops.Add, o, b.op(ops.Mul, c, p[1]))
        return [b.op(ops.Mul, b.op(first, o), b.op(third, c)), c]

    def _gru(self, given: Entry, h: Entry) -> Entry:
        b, (first, second) = self.b, self.acts
        z, r, new = self.split(given, 3)
        if self._resets_last:
            rz, rr, rest = self.split(b.op(ops.Linear, h, self.recurrence), 3)
            if self.biases is not None:
                rest = b.op(ops.Add, rest, self.biases[5])
            r = b.op(first, b.op(ops.Add, r, rr))
            rest = b.op(ops.Mul, r, rest)
        else:
            sizes = (self.hidden,) * 3
            wz, wr, wh = b.add(ops.Split(b.get(self.recurrence), dim=0, sizes=sizes)).results
            rz = b.op(ops.Linear, h, wz)
            r = b.op(first, b.op(ops.Add, r, b.op(ops.Linear, h, wr)))
            rest = b.op(ops.Linear, b.op(ops.Mul, r, h), wh)
        z = b.op(first, b.op(ops.Add, z, rz))
        new = b.op(second, b.op(ops.Add, new, rest))
        return b.op(ops.Add, new, b.op(ops.Mul, z, b.op(ops.Sub, h, new)))
