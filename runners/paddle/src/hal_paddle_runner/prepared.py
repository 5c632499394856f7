"""The decoder in host memory as prepared calls: oneDNN's products and attention, NumPy between them.

An operator of a framework costs a small step more than its computation. Here weights are packed once, residual sums,
SiLU and the gate's product are ends of products, and kernels and buffers are made once for a class of sizes, to which
rows, queries and keys are padded. Results differ from those of the operators (:mod:`hal_paddle_runner.llama`) by
rounding only; the cache is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from hal_core import InvalidValue

from .batch import SHORT, RowOrder, by_length, check_batch, order_rows, padded, pieces_of, slots_after, slots_of
from .onednn import Floats, Unsuitable, library_path, open_library
from .packed import Attention, Head, PackedWeights, Room, Rows, row_sums

if TYPE_CHECKING:
    from hal_engine.model.config import LlamaConfig

    from .batch import CacheShape, ModelBatch
    from .host_cache import HostCache
    from .onednn import Call
    from .packed import Layer
    from .ranks import TensorRanks

Array = np.ndarray[Any, Any]
MOST_KEPT = 64
"""Most kept classes of a kind: of rows (1.5 MB each, as the library describes a product in 280 KB) and of attention, of
which steps that verify drafts have many. So many are made before the first step, one of rows in some 3 ms; a later one
is made when a step needs it."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass
class _Plan:
    """A step: its class of rows, and the places of its tokens."""

    rows: Rows
    tokens: int
    x: Floats
    """Of the tokens."""
    sums: tuple[Callable[[], None], Callable[[], None]] | None
    """If there are ranks: they write to ``x`` the sums over them, of ``x`` and of the products' results, to which the
    first rank has added its ``x``."""
    tables: bytes
    left: int
    """How many steps may follow: until a row's token comes into another piece, or to its last position."""
    positions: Array
    """int64 ``[class]``, those of the tokens first."""
    outputs: Array
    write: Array
    clear: Array | None
    groups: list[tuple[Attention, Array, Array]]
    """Each with the pieces to read, and ``cached``, one piece a row."""
    order: RowOrder | None
    joined: list[Floats]
    """Queries and results in the groups' order, one head a row; [] where that is the tokens' order."""
    keys: Floats
    values: Floats
    slots: Floats
    """Keys and values as they are written, and both as ``[slots, head_dim]``."""


class PreparedDecoder:
    """The layers and the head of a model in host memory, or of a rank's part of it. ``steps`` counts the steps run."""

    def __init__(
        self,
        config: LlamaConfig,
        local: LlamaConfig,
        tensors: dict[str, np.ndarray],
        ranks: TensorRanks | None,
        embed: Callable[[Array, Floats], object],
        turned: Callable[[Array], Array],
    ) -> None:
        """``local``: of the rank's part; ``tensors``: those of the layers are removed; ``embed`` writes the embeddings
        of tokens to rows, zeros where another rank has them; ``turned`` gives the rotations at positions, complex64
        ``[n, 1, head_dim / 2]``.

        Raises :class:`hal_paddle_runner.onednn.Unsuitable` where the library or a kernel is missing; nothing is removed
        then."""
        onednn = open_library(library_path())
        self._config, self._local, self._ranks, self._embed, self._turned = config, local, ranks, embed, turned
        self._onednn, self._execute = onednn, onednn.execute
        self.weights = PackedWeights(onednn, local, tensors, adds=ranks is None or not ranks.index)
        self._rows: dict[int, Rows] = {}
        self._heads: dict[int, Head] = {}
        self._orders: dict[bytes, RowOrder | None] = {}
        self._room, self._joined_room = Room(), Room()
        self._rooms = Room(), Room(), Room()  # of attention: the groups of a step are used at once
        self._shape: CacheShape | None = None
        self._last: _Plan | None = None
        self.steps = 0
        for sizes in ((1, 1, 16), (8, 1, 64), (1, 16, 64)):
            self._attention(*sizes)
        if slow := [name for name in onednn.names if "ref" in name]:
            raise Unsuitable(f"oneDNN has only its reference code for them on this CPU ({', '.join(slow)})")
        self._kinds = set(onednn.names)
        self.weights.pack(tensors)

    def attach(self, cache: HostCache) -> None:
        """Use a new cache. The caller keeps it."""
        self._shape, self._last = cache.shape, None
        self._views = self.views(cache)

    def views(self, cache: HostCache) -> list[tuple[Floats, Floats]]:
        """Return each layer of a cache as slots, and as pieces."""
        width = cache.shape.piece * self.weights.width
        return [(array, array.reshape(-1, width)) for array in cache.layers]

    def prepare(self, most_rows: int) -> str:
        """Make the classes of decode steps of up to so many rows, the largest first, whose memory the others share;
        return a line about it."""
        began, wanted = time.perf_counter(), sorted({padded(rows) for rows in range(1, most_rows + 1)}, reverse=True)
        made = 0
        for rows in wanted[:MOST_KEPT]:
            self._classes(rows)
            self._head(rows)
            made += 1
        took = time.perf_counter() - began
        return f"{made} of {len(wanted)} classes of rows prepared in {took:.2f} s ({', '.join(sorted(self._kinds))})"

    def run(self, batch: ModelBatch) -> tuple[Floats, Array]:
        """Run the layers. Return the hidden states of all tokens before the last norm, ``[tokens, hidden]``, which the
        next run overwrites, and int64 ``[n]``: the tokens whose logits are requested.

        Raises :class:`InvalidValue` for a batch that cannot be computed; nothing is written then."""
        if self._shape is None:
            raise InvalidValue("no cache", cure="call allocate_cache first", argument="forward")
        if (plan := self._following(batch)) is None:
            check_batch(batch, self._config, self._shape)
            plan = self._planned(batch, self._shape)
        self.steps += 1
        self._embed(batch.token_ids, plan.x)
        if plan.sums is not None:
            plan.sums[0]()
        self._compute(plan, zip(self._views, self.weights.layers, plan.rows.layers, strict=True))
        return plan.x, plan.outputs

    def run_more(self, batch: ModelBatch, x: Floats, layer: Layer, view: tuple[Floats, Floats]) -> Floats:
        """Run one more layer, the prediction layer, on ``x`` ``[tokens, hidden]``, with a cache of its own, which is as
        large; return the result of the tokens that are requested. The batch is not checked."""
        assert self._shape is not None
        plan = self._following(batch) or self._planned(batch, self._shape)
        plan.x[:] = x
        if plan.rows.more is None:
            plan.rows.more = plan.rows.calls(layer)
        self._compute(plan, [(view, layer, plan.rows.more)])
        return plan.x[plan.outputs]

    @np.errstate(all="ignore")  # a sum may be infinite
    def _compute(self, plan: _Plan, layers: Iterable[tuple[tuple[Floats, Floats], Layer, list[Call]]]) -> None:
        """Run layers in place on the plan's ``x``; with each its cache, as slots and as pieces, and its calls."""
        rows, sums, execute = plan.rows, plan.sums, self._execute
        self._onednn.enter()
        if plan.tokens < rows.rows:
            rows.x[plan.tokens :] = 0
        turns, failed = self._turned(plan.positions), 0
        for (slots, pieces), layer, (qkv, output, gate, up, down) in layers:
            rows.norm()
            failed |= execute(*qkv)
            if layer.head_norm is not None:
                rows.norm_heads(layer.head_norm)
            np.multiply(rows.complex, turns, out=rows.rotated)
            np.copyto(rows.query_rows, rows.query_halves)
            np.copyto(plan.keys, rows.key_halves[: plan.tokens])
            np.copyto(plan.values, rows.values[: plan.tokens])
            if plan.clear is not None:
                slots[plan.clear] = 0
            slots[plan.write] = plan.slots
            failed |= self._attend(plan, pieces)
            failed |= execute(*output)
            if sums is not None:
                sums[1]()
            rows.norm()
            failed |= execute(*gate)
            failed |= execute(*up)
            failed |= execute(*down)
            if sums is not None:
                sums[1]()
        self._onednn.check(failed)

    def normed(self, hidden: Floats, weight: Any = None) -> Floats:  # noqa: ANN401 (a number, or one for each column)
        """Return hidden states after a norm, by default the last one, in an array of their own. ``weight``: times the
        root of its width."""
        sums = np.empty(hidden.shape[:-1], np.float32)
        row_sums(hidden, sums)
        sums += self.weights.eps
        found = np.divide(hidden, np.sqrt(sums, out=sums)[..., None], out=np.empty_like(hidden))
        return np.multiply(found, self.weights.norm if weight is None else weight, out=found)

    def logits(self, normed: Floats) -> Floats:
        """Return the logits of hidden states after the last norm: ``[n, vocabulary]``, of the rank's part of it."""
        return self._head(padded(len(normed)))(normed)

    def _attend(self, plan: _Plan, pieces: Floats) -> int:
        """Write the attention of all tokens; return 0, or something else if a call failed."""
        execute, rows, failed = self._execute, plan.rows, 0
        if plan.order is not None:
            width = self.weights.width
            rows.queries.reshape(-1, width).take(plan.order.query_index, 0, plan.joined[0], "clip")
        for attention, index, cached in plan.groups:
            pieces.take(index, 0, cached, "clip")
            first, second, third = attention.calls
            failed |= execute(*first)
            failed |= execute(*second)
            failed |= execute(*third)
        if plan.order is not None:
            result = rows.attended[: plan.tokens].reshape(-1, width)
            plan.joined[1].take(plan.order.merge_index, 0, result, "clip")
        return failed

    def _following(self, batch: ModelBatch) -> _Plan | None:
        """Return the last plan, changed accordingly, if each row of that, all of one token, runs its next token, in the
        same piece of a block; else None. Nothing but the tokens has to be checked then."""
        plan, ids, at = self._last, batch.token_ids, batch.positions
        if plan is None or plan.order is not None or batch.outputs is not None or not plan.left:
            return None
        if not len(ids) == batch.row_lengths.size == len(plan.outputs) == plan.tokens:
            return None
        after = plan.positions[: plan.tokens] + 1
        if at.tobytes() != after.tobytes() or batch.block_tables.tobytes() != plan.tables:
            return None
        if (batch.context_lengths != at).any() or ids.view(np.uint64).max() >= self._config.vocab_size:
            return None
        plan.positions[: plan.tokens] = after
        plan.left -= 1
        plan.write += 1
        plan.clear = None
        plan.groups[0][0].mask[plan.outputs, :, 0, at] = 0
        return plan

    def _planned(self, batch: ModelBatch, shape: CacheShape) -> _Plan:
        """Return the plan of a batch."""
        config = self._local
        self._last = None
        lengths, tokens = batch.row_lengths, batch.token_ids.size
        one_each, rows = tokens == lengths.size, self._classes(padded(tokens))
        of_rows = np.arange(lengths.size) if one_each else np.repeat(np.arange(lengths.size), lengths)
        last = of_rows if one_each else np.cumsum(lengths, dtype=np.int64) - 1
        positions = np.zeros(rows.rows, np.int64)
        positions[:tokens] = batch.positions
        groups = [self._group(batch, chosen) for chosen in ([of_rows] if one_each else by_length(lengths))]
        order, joined = self._placed(lengths, rows, groups, one_each=one_each)
        count, width = tokens * config.num_key_value_heads, config.head_dim
        written = rows.written[: 2 * count * width].reshape(2, tokens, -1, width)
        x, ranks = rows.x[:tokens], self._ranks
        plan = _Plan(
            rows=rows,
            tokens=tokens,
            x=x,
            sums=None if ranks is None else (ranks.summing(x, x), ranks.summing(rows.result[:tokens], x)),
            tables=batch.block_tables.tobytes(),
            left=min(
                int((~batch.positions % shape.piece).min()), config.max_position_embeddings - 1 - int(positions.max())
            ),
            positions=positions,
            outputs=last if batch.outputs is None else batch.outputs,
            write=slots_of(batch, config, shape, of_rows, batch.positions),
            clear=slots_after(batch, config, shape),
            groups=groups,
            order=order,
            joined=joined,
            keys=written[0].reshape(tokens, -1, 2, width // 2),
            values=written[1],
            slots=written.reshape(-1, width),
        )
        self._last = plan
        return plan

    def _placed(
        self, lengths: Array, rows: Rows, groups: list[tuple[Attention, Array, Array]], *, one_each: bool
    ) -> tuple[RowOrder | None, list[Floats]]:
        """Give the groups their queries and results; return the order of the rows' tokens in them, and both joined."""
        if one_each:
            groups[0][0].place(rows.queries, rows.attended)
            return None, []
        order = kept(self._orders, lengths.tobytes(), lambda: order_rows(lengths, self._local, padded))
        assert order is not None
        shape = order.query_index.size, self.weights.width
        joined, begin = self._joined_room.arrays(shape, shape), 0
        for attention, _, _ in groups:
            attention.place(joined[0][begin:], joined[1][begin:])
            begin += attention.rows * attention.queries * self.weights.heads
        return order, joined

    def _group(self, batch: ModelBatch, chosen: Array) -> tuple[Attention, Array, Array]:
        """Return attention of the rows with these numbers, its mask filled, with what it reads."""
        assert self._shape is not None
        count, rows, tables = len(chosen), padded(len(chosen)), batch.block_tables
        lengths, contexts = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        lengths[:count], contexts[:count] = batch.row_lengths[chosen], batch.context_lengths[chosen]
        padding = np.zeros((rows - count, tables.shape[1]), tables.dtype)
        tables = tables[chosen] if count == rows else np.concatenate([tables[chosen], padding])
        index, keys = pieces_of(tables, contexts + lengths, self._local, self._shape, padded)
        attention = self._attention(rows, padded(int(lengths.max())), keys)
        # Query q sees the positions up to context + q: of all queries these are windows of one line, each a step back.
        before = attention.queries - 1
        sees = np.arange(before + keys) <= contexts[:, None] + before
        line = np.where(sees, np.float32(0), np.float32(-np.inf))
        strides = line.strides[0], -line.itemsize, line.itemsize
        windows = np.ndarray((rows, before + 1, keys), line.dtype, line, before * line.itemsize, strides)
        attention.mask[:] = windows[:, None]
        return attention, index, attention.cached.reshape(len(index), -1)

    def _classes(self, rows: int) -> Rows:
        return kept(self._rows, rows, lambda: Rows(self.weights, rows, self._room))

    def _head(self, rows: int) -> Head:
        return kept(self._heads, rows, lambda: Head(self.weights, rows))

    def _attention(self, rows: int, queries: int, keys: int) -> Attention:
        room = self._rooms[0 if queries == 1 else 1 if queries <= SHORT else 2]
        users: dict[tuple[int, int, int], Attention] = room.users
        return kept(users, (rows, queries, keys), lambda: Attention(self.weights, rows, queries, keys, room))


def kept(found: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """Return an entry, which is made where it is missing, instead of the oldest one of too many."""
    if key not in found:
        made = make()  # which may clear them
        if len(found) >= MOST_KEPT:
            del found[next(iter(found))]
        found[key] = made
    return found[key]
