"""The compiled programs of the engine: a handful, all known before the first request.

* `feed`: several tokens of one slot, one program per feed length. It runs alone, so
  nothing of another request can reach it.
* `decode`: one token of every slot. A row's bits do not depend on the others.
* `load` and `store`: copy whole prefix blocks between the pool and a slot.
* `clear`: zero a slot, of a request that was ended before it was done.
* `top`: the likeliest tokens of a draw, from the logits that `feed` and `decode` leave
  on the device. It runs only when somebody asks; nothing is drawn from what it says.

Which of them a request meets is a function of that request alone (`rows.py`). All read
one packed int32 array a call, and give back one, because a transfer costs as much as a
small layer. Caches and pool are donated and updated in place.
"""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kiln_core.engine import MAX_TOP_LOGPROBS
from kiln_core.errors import PolicyError
from kiln_train_jax.attention import BatchContext, KeyValue, RowContext
from kiln_train_jax.guide import mask_words
from kiln_train_jax.lora import Lora, select_one, select_rows
from kiln_train_jax.sampler import Draw, draw_tokens, likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiln_train_jax.config import ModelConfig
    from kiln_train_jax.model import Decoder

FEEDS: Final = (16, 64)
"""Feed lengths beside 1; the largest is the block of prefix reuse."""
BLOCK: Final = FEEDS[-1]
TOP: Final = MAX_TOP_LOGPROBS
"""Likeliest tokens that can be read at a draw."""

COMPILERS: Final = 2
"""Programs compiled side by side at start."""

COLUMNS: Final = (
    "slot",
    "start",
    "count",
    "adapter",
    "seed_high",
    "seed_low",
    "top_k",
    "temperature",
    "top_p",
    "min_p",
)
"""Leading columns of a packed row; float columns hold float32 bits."""
AT: Final = {name: index for index, name in enumerate(COLUMNS)}
HEAD: Final = len(COLUMNS)


class Caches(NamedTuple):
    """Device state that every call takes and gives back."""

    slots: tuple[KeyValue, ...]
    """Per layer `[slots, kv_heads, cache_tokens, head_dim]`."""
    pool: tuple[KeyValue, ...]
    """Per layer `[blocks, kv_heads, BLOCK, head_dim]`."""


Drawn: TypeAlias = tuple[Caches, jax.Array, jax.Array]
"""Caches, what was drawn, and the logits it was drawn from, left on the device."""


def empty_caches(
    config: ModelConfig, *, slots: int, cache_tokens: int, blocks: int, dtype: Any
) -> Caches:
    """Return zeroed caches; zeros, since what is masked must still be finite."""

    def layers(rows: int, length: int) -> tuple[KeyValue, ...]:
        shape = (rows, config.num_key_value_heads, length, config.head_dim)
        return tuple(
            KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(config.num_hidden_layers)
        )

    return Caches(layers(slots, cache_tokens), layers(blocks, BLOCK))


class Programs:
    """The compiled programs of one model for one engine."""

    def __init__(
        self,
        model: Decoder,
        caches: Caches,
        bank: Lora,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compile everything a request may meet.

        Args:
            model: Its parameters are shared, not copied.
            caches: Only their shapes matter here.
            bank: Only its shapes matter here.
            stopped: Asked before every program; once true, no more are compiled.
        """
        self.vocabulary = model.config.vocab_size
        self.words = mask_words(self.vocabulary)
        self._graph, state = nnx.split(model)
        self._leaves, self._tree = jax.tree.flatten(state)
        slots, _, cache_tokens, _ = caches.slots[0].key.shape
        self._most_blocks = cache_tokens // BLOCK
        zero = np.int32(0)
        state_of = (self._leaves, caches, bank)
        wanted: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "decode": (self._decode_rows, (*state_of, self.packed(slots, 1), zero)),
            "load": (_load_blocks, (caches, zero, zero, self._entries([]))),
            "store": (_store_block, (caches, zero, zero, zero)),
            "clear": (_clear_slot, (caches, zero)),
        }
        for length in FEEDS:
            wanted[f"feed {length}"] = (
                self._feed_row,
                (*state_of, self.packed(1, length)),
            )
        for rows in (1, slots):
            logits = np.zeros((rows, self.vocabulary), np.float32)
            wanted[f"top {rows}"] = (self._top_rows, (logits, self._heads(rows)))
        with ThreadPoolExecutor(COMPILERS) as pool:
            compiled = pool.map(
                lambda each: _stopped_program if stopped() else _compile(each),
                wanted.values(),
            )
            self._compiled = dict(zip(wanted, compiled, strict=True))

    def packed(self, rows: int, tokens: int) -> np.ndarray:
        """Return an empty packed argument, int32 `[rows, columns]`.

        Columns are `COLUMNS`, then the mask words, then the tokens.
        """
        return np.zeros((rows, HEAD + self.words + tokens), np.int32)

    def decode(
        self, caches: Caches, bank: Lora, rows: np.ndarray, longest: int
    ) -> Drawn:
        """Feed one token to every slot and draw the next of each.

        Args:
            caches: Donated.
            bank: Adapters by slot.
            rows: `packed(slots, 1)`; idle rows carry their own length as start.
            longest: Positions the longest active row must see.

        Returns:
            The caches; int32 `[slots, 2]`, token and log-probability bits; logits.
        """
        program = self._compiled["decode"]
        answer: Drawn = program(self._leaves, caches, bank, rows, np.int32(longest))
        return answer

    def feed(self, caches: Caches, bank: Lora, row: np.ndarray) -> Drawn:
        """Feed tokens to one slot and draw the next.

        Args:
            caches: Donated.
            bank: Adapters by slot.
            row: `packed(1, length)` for a length in `FEEDS`; `count` tokens are real.

        Returns:
            The caches; int32 `[1, 2]`, token and log-probability bits; logits.
        """
        program = self._compiled[f"feed {row.shape[1] - HEAD - self.words}"]
        answer: Drawn = program(self._leaves, caches, bank, row)
        return answer

    def top(self, logits: jax.Array, rows: np.ndarray) -> np.ndarray:
        """Read the likeliest tokens of a draw.

        Args:
            logits: As `feed` or `decode` left them.
            rows: The packed argument it had.

        Returns:
            int32 `[rows, TOP, 2]`: token and log-probability bits, likeliest first.
        """
        heads = np.ascontiguousarray(rows[:, : HEAD + self.words])
        return np.asarray(self._compiled[f"top {len(rows)}"](logits, heads))

    def load(
        self, caches: Caches, slot: int, first: int, entries: Sequence[int]
    ) -> Caches:
        """Copy pool blocks into a slot, side by side from position `first`.

        Args:
            caches: Donated.
            slot: Row of the caches.
            first: Position of the first block.
            entries: Pool blocks, in order.
        """
        places = (np.int32(slot), np.int32(first), self._entries(entries))
        loaded: Caches = self._compiled["load"](caches, *places)
        return loaded

    def store(self, caches: Caches, slot: int, start: int, entry: int) -> Caches:
        """Copy the block of a slot that begins at `start` into pool block `entry`.

        Args:
            caches: Donated.
            slot: Row of the caches.
            start: Position of the block.
            entry: Pool block.
        """
        places = (np.int32(slot), np.int32(start), np.int32(entry))
        stored: Caches = self._compiled["store"](caches, *places)
        return stored

    def clear(self, caches: Caches, slot: int) -> Caches:
        """Zero a slot: what is masked later must be finite, and may not be now.

        Args:
            caches: Donated.
            slot: Row of the caches.
        """
        cleared: Caches = self._compiled["clear"](caches, np.int32(slot))
        return cleared

    def _heads(self, rows: int) -> np.ndarray:
        return self.packed(rows, 0)

    def _entries(self, entries: Sequence[int]) -> np.ndarray:
        padded = np.full(self._most_blocks, -1, np.int32)
        padded[: len(entries)] = entries
        return padded

    def _model(self, leaves: list[jax.Array]) -> Decoder:
        state = jax.tree.unflatten(self._tree, leaves)
        model: Decoder = nnx.merge(self._graph, state)
        return model

    def _decode_rows(
        self,
        leaves: list[jax.Array],
        caches: Caches,
        bank: Lora,
        rows: jax.Array,
        longest: jax.Array,
    ) -> Drawn:
        model = self._model(leaves)
        starts = rows[:, AT["start"]]
        context = BatchContext(caches.slots, starts, longest)
        hidden, slots = model(
            rows[:, -1:],
            starts[:, None],
            context,
            select_rows(bank, rows[:, AT["adapter"]]),
        )
        logits = model.logits(hidden[:, 0])
        drawn = self._draw(logits, rows, starts + 1)
        return caches._replace(slots=slots), drawn, logits

    def _feed_row(
        self, leaves: list[jax.Array], caches: Caches, bank: Lora, row: jax.Array
    ) -> Drawn:
        model = self._model(leaves)
        tokens = row[:, HEAD + self.words :]
        slot, start, count = (row[0, AT[name]] for name in ("slot", "start", "count"))
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        hidden, slots = model(
            tokens,
            positions[None],
            RowContext(caches.slots, slot, start),
            select_one(bank, row[0, AT["adapter"]]),
        )
        last = jax.lax.dynamic_index_in_dim(hidden[0], count - 1, keepdims=True)
        logits = model.logits(last)
        drawn = self._draw(logits, row, (start + count)[None])
        return caches._replace(slots=slots), drawn, logits

    def _draw(
        self, logits: jax.Array, rows: jax.Array, position: jax.Array
    ) -> jax.Array:
        tokens, logprobs = draw_tokens(logits, self._draw_of(rows, position))
        return jnp.stack([tokens, _bits(logprobs, jnp.int32)], axis=-1)

    def _top_rows(self, logits: jax.Array, rows: jax.Array) -> jax.Array:
        draw = self._draw_of(rows, rows[:, AT["start"]])
        tokens, logprobs = likeliest(logits, draw, min(TOP, self.vocabulary))
        return jnp.stack([tokens, _bits(logprobs, jnp.int32)], axis=-1)

    def _draw_of(self, rows: jax.Array, position: jax.Array) -> Draw:
        return Draw(
            mask=rows[:, HEAD : HEAD + self.words],
            seed=_bits(rows[:, AT["seed_high"] : AT["seed_low"] + 1], jnp.uint32),
            position=position,
            temperature=_bits(rows[:, AT["temperature"]], jnp.float32),
            top_k=rows[:, AT["top_k"]],
            top_p=_bits(rows[:, AT["top_p"]], jnp.float32),
            min_p=_bits(rows[:, AT["min_p"]], jnp.float32),
        )


def _compile(wanted: tuple[Callable[..., Any], tuple[Any, ...]]) -> Callable[..., Any]:
    """Compile one program for the shapes of its arguments; caches are donated."""
    function, arguments = wanted
    donated = {"caches"} & inspect.signature(function).parameters.keys()
    lowered = jax.jit(function, donate_argnames=tuple(donated)).lower(*arguments)
    compiled: Callable[..., Any] = lowered.compile()
    return compiled


def _stopped_program(*arguments: Any) -> Any:
    """Stand for a program of an engine that was stopped before it began.

    Raises:
        PolicyError: Always.
    """
    raise PolicyError("the engine is stopping")


def _bits(values: jax.Array, dtype: Any) -> jax.Array:
    """Read 32-bit values as another 32-bit dtype."""
    return jax.lax.bitcast_convert_type(values, dtype)


def _load_blocks(
    caches: Caches, slot: jax.Array, first: jax.Array, entries: jax.Array
) -> Caches:
    """Copy pool blocks into a slot, side by side.

    Args:
        caches: Donated.
        slot: int32 scalar.
        first: int32 scalar, position of the first block.
        entries: int32 `[n]`, pool blocks; the first negative one ends the list.
    """
    count = jnp.sum(entries >= 0)

    def step(index: jax.Array, slots: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
        place = (slot, 0, first + index * BLOCK, 0)
        copied: tuple[KeyValue, ...] = jax.tree.map(
            lambda cache, pool: jax.lax.dynamic_update_slice(
                cache,
                jax.lax.dynamic_index_in_dim(pool, entries[index], keepdims=True),
                place,
            ),
            slots,
            caches.pool,
        )
        return copied

    return caches._replace(slots=jax.lax.fori_loop(0, count, step, caches.slots))


def _clear_slot(caches: Caches, slot: jax.Array) -> Caches:
    """Zero a slot; int32 scalar."""

    def clear(cache: jax.Array) -> jax.Array:
        zeros = jnp.zeros((1, *cache.shape[1:]), cache.dtype)
        return jax.lax.dynamic_update_slice(cache, zeros, (slot, 0, 0, 0))

    return caches._replace(slots=jax.tree.map(clear, caches.slots))


def _store_block(
    caches: Caches, slot: jax.Array, start: jax.Array, entry: jax.Array
) -> Caches:
    """Copy a slot's block at `start` into pool block `entry`; int32 scalars."""

    def copy(pool: jax.Array, cache: jax.Array) -> jax.Array:
        size = (1, *pool.shape[1:])
        block = jax.lax.dynamic_slice(cache, (slot, 0, start, 0), size)
        return jax.lax.dynamic_update_slice(pool, block, (entry, 0, 0, 0))

    return caches._replace(pool=jax.tree.map(copy, caches.pool, caches.slots))
