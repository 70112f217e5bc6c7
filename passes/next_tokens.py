"""`next-tokens`: a language model returns the likeliest tokens in place of all logits."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.result_names import NEXT_TOKENS, TOP_LOGITS, TOP_TOKENS
from irc.ops import AllGather, Argmax, ShardedTopk, Slice, Squeeze, Topk
from irc.pipeline import Option, Pass, Stats, register
from irc.rewrite import erase_dead, permit

from .shared.edit import named_results, set_results


@register("next-tokens")
class NextTokens(Pass):
    """The result `logits` [B, T, vocab] becomes `next_tokens` i32 [B, T], the place of the largest.

    With `k` there are `top_tokens` and `top_logits` [B, T, k] as well, the largest first. Of equal
    ones the first counts. Where logits are sharded over ranks, only candidates are sent.
    """

    view = "global"
    flag = Option("return the likeliest tokens, not logits", "next_tokens")

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
        last = logits.type.ndim - 1
        if last < 0:
            raise Error(f"the result {self.result} is {logits.type}, a scalar; it has no tokens")
        gather = logits.producer
        fixed = isinstance(logits.type.shape[last], int)
        if isinstance(gather, AllGather) and gather.dim % logits.type.ndim == last and fixed:
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
        results = {NEXT_TOKENS: _add(function, Squeeze(first, dims=(last,)), logits)}
        return results | ({TOP_TOKENS: places, TOP_LOGITS: values} if self.k else {})


def _add(function: Function, op: Op, logits: Value) -> Value:
    op.loc = logits.producer.loc if logits.producer is not None else None
    function.insert(op, function.last)
    return op.results[0]


def _put(function: Function, at: int, new: dict[str, Value]) -> None:
    """Return other values in place of one."""
    old, values = named_results(function), function.returned
    results = [*old[:at], *(Result(name) for name in new), *old[at + 1 :]]
    set_results(function, [*values[:at], *new.values(), *values[at + 1 :]], results)
    owner = values[at].producer
    if owner is not None and not any(result.users for result in owner.results):
        erase_dead(owner)
