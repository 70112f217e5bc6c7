"""`page-caches`: key-value caches become pools of pages, which all sequences share."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Function, Module, Value
from irc.ir.dims import symbol
from irc.ir.types import TensorType
from irc.ops import CacheUpdate, GatherPages
from irc.pipeline import Option, Pass, Stats, option, register
from irc.rewrite import permit

from .shared.edit import insert_before, used_once
from .static_capacity import fix_capacities

_NAME = "page-caches"
PAGES = "pages"  # the argument that says where the tokens of a sequence lie
_POOL = "P"  # the symbol of the number of pages
_MOST = 1 << 20


@register(_NAME)
class PageCaches(Pass):
    """Key-value caches become pools of pages, which all sequences share.

    Every state [B, heads, C, D] that a cache_update writes becomes a pool [P, heads, page, D], and
    the argument `pages` i32 [B, C / page] has the page of each `page` tokens of a sequence, -1 for
    none.

    C becomes the most that it may be, so that plans depend on no length of a sequence. The states
    of a model become pools together or not at all.
    """

    view = "global"
    behind = ("inline", "shard")
    flag = Option("keep KV caches in pages that all conversations share", "page_caches")

    page: int = option(64, "tokens of a page", keyword="page_tokens", metavar="N", least=1)

    def run(self, module: Module, stats: Stats) -> None:
        if self.page < 1:
            raise Error(f"page-caches: a page has at least one token, not {self.page}")
        updates = _updates(module.main)
        if not updates or not permit(_NAME, updates[0]):
            return
        _check(module, updates)
        fix_capacities(module, stats, self.page)
        rows, _, capacity, _ = updates[0].cache.type.shape
        if {update.cache.type.shape[2] for update in updates} != {capacity}:
            raise Error("page-caches: expected caches of one capacity").at(updates[0])
        assert isinstance(capacity, int)
        if capacity % self.page:
            raise Error(f"the caches hold {capacity} tokens, which are no pages of {self.page}").at(
                updates[0]
            )
        count = capacity // self.page
        typical = module.dims[str(rows)][1] if str(rows) in module.dims else 1
        module.dims[_POOL] = (1, count * typical, max(_MOST, count * typical))
        pages = module.main.add_argument(PAGES, TensorType("i32", (rows, count)))
        for update in updates:
            _page(update, pages, self.page)
            stats.count("caches")


def _updates(function: Function) -> list[CacheUpdate]:
    """The operations that write the states of a function, where they write whole tokens."""
    states = {function.args[at] for at in function.aliases().values()}
    return [
        op
        for op in function
        if isinstance(op, CacheUpdate) and op.cache in states and op.pages is None
    ]


def _check(module: Module, updates: list[CacheUpdate]) -> None:
    """An Error unless the states of the main function are caches that can be pools."""
    function = module.main
    by_cache = {update.cache: update for update in updates}
    for result, at in function.aliases().items():
        state = function.args[at]
        update = by_cache.get(state)
        alone = update is not None and used_once(state)
        if update is None or not alone or function.returned[result] is not update.result:
            raise Error(
                "page-caches: expected states that one cache_update each writes, found "
                f"%{state.name}, which is another one; compile without --page-caches"
            )
        if state.type.axes[0]:
            raise Error(
                f"page-caches: the rows of %{state.name} are sharded over "
                f"{'.'.join(state.type.axes[0])}, but ranks that share rows share no pages; give a "
                "mesh without dp"
            ).at(update)
    names = {arg.name for arg in function.args}
    if PAGES in names or _POOL in module.dims:
        raise Error(f"page-caches: the model has an argument {PAGES} or a size {_POOL} already")


def _page(update: CacheUpdate, pages: Value, size: int) -> None:
    """Let an update write into a pool, and what reads its result gather its pages."""
    cache, new, past = update.operands
    _, heads, _, width = cache.type.shape
    axes = ((), *cache.type.axes[1:])
    cache.type = TensorType(cache.type.dtype, (symbol(_POOL), heads, size, width), axes)
    pool = insert_before(CacheUpdate(cache, new, past, pages=pages), update).result
    pool.name = update.result.name
    readers = [user for user in update.result.users if user.opname != "return"]
    if readers:
        caches = insert_before(GatherPages(pool, pages), update).result
        for user in readers:
            user.set_operands(tuple(caches if v is update.result else v for v in user.operands))
    update.result.replace_by(pool)
    update.erase()
