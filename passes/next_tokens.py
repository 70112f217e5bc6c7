"""`next-tokens`: a language model gives the likeliest tokens in place of all logits."""

from __future__ import annotations

from irc.core import Function, Module, Op, Result, Value
from irc.errors import Error
from irc.ops import AllGather, Argmax, Return, ShardedTopk, Slice, Squeeze, Topk
from irc.pipeline import Pass, Stats, register
from irc.results import NEXT_TOKENS, TOP_LOGITS, TOP_TOKENS
from irc.rewrite import erase_dead, permit


@register("next-tokens")
class NextTokens(Pass):
    """The result `logits` [B, T, vocab] becomes `next_tokens` i32 [B, T], the place of the largest.

    With `k` there are `top_tokens` and `top_logits` [B, T, k] as well, the largest first. Of equal
    ones the first counts. Where logits are split over ranks, only candidates are sent.
    """

    k: int = 0
    result: str = "logits"

    def run(self, module: Module, stats: Stats) -> None:
        if module.local:
            raise Error("next-tokens comes before localize: the module is in the local view")
        if self.k < 0:
            raise Error("next-tokens: k is a number of likely tokens, or 0 for none but the first")
        function = module.main
        names = function.result_names()
        if self.result not in names:
            if NEXT_TOKENS in names:
                return
            raise Error(
                f"@{function.name} has no result called {self.result}; it has {', '.join(names)}"
            )
        at = names.index(self.result)
        logits = function.returned[at]
        assert function.last is not None
        if permit("next-tokens", function.last):
            _put(function, at, self._chosen(function, logits))
            stats.count("results")

    def _chosen(self, function: Function, logits: Value) -> dict[str, Value]:
        """The new results by name, of operations at the end of the function."""
        last = logits.type.rank - 1
        if last < 0:
            raise Error(f"the result {self.result} is {logits.type}, one number; nothing to choose")
        gather = logits.producer
        if isinstance(gather, AllGather) and gather.dim % logits.type.rank == last:
            op: Op = ShardedTopk(gather.x, k=max(1, self.k), axis=gather.axis, dim=last)
        elif not self.k:
            return {NEXT_TOKENS: _add(function, Argmax(logits, dim=last), logits)}
        else:
            op = Topk(logits, k=self.k, dim=last)
        _add(function, op, logits)
        values, places = op.results
        first = places if self.k <= 1 else Slice(places, dim=last, start=0, stop=1)
        if isinstance(first, Op):
            first = _add(function, first, logits)
        found = {NEXT_TOKENS: _add(function, Squeeze(first, dims=(last,)), logits)}
        return found | ({TOP_TOKENS: places, TOP_LOGITS: values} if self.k else {})


def _add(function: Function, op: Op, logits: Value) -> Value:
    op.loc = logits.producer.loc if logits.producer is not None else None
    function.insert(op, function.last)
    return op.results[0]


def _put(function: Function, at: int, new: dict[str, Value]) -> None:
    """Return other values in the place of one."""
    last, aliases = function.last, function.aliases()
    assert last is not None
    names = function.result_names()
    old = [Result(name, _alias(function, aliases.get(i))) for i, name in enumerate(names)]
    values = last.operands
    fresh = Return([*values[:at], *new.values(), *values[at + 1 :]])
    fresh.loc = last.loc
    last.erase()
    function.append(fresh)
    function.results = (*old[:at], *(Result(name) for name in new), *old[at + 1 :])
    owner = values[at].producer
    if owner is not None and not any(result.users for result in owner.results):
        erase_dead(owner)


def _alias(function: Function, argument: int | None) -> str | None:
    return None if argument is None else function.args[argument].name
