"""A model with its KV pool on one device: packs a step's rows into few shapes and runs them as one call."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vtoken.errors import SpecError
from vtoken.executor import DType, KVSpec
from vtoken.policies.base import MassNeed
from vtoken.policies.ranking import Choice
from vtoken.serving.protocol import StepRow
from vtoken.types import BlockId, Position, cdiv
from vtoken_jax.buckets import bucket, pad, width_bucket
from vtoken_jax.kernels.decode import Implementation, choose
from vtoken_jax.kv_store import JaxKVStore
from vtoken_jax.mass import clear_row, make_masses, read_masses
from vtoken_jax.model.config import ModelConfig, read_eos_token_ids
from vtoken_jax.model.forward import PAD_POSITION, Segment, run_step
from vtoken_jax.model.load import load_weights
from vtoken_jax.model.tiles import tiles_pay
from vtoken_jax.placement import checked_device, made_on, platform_of
from vtoken_jax.ranking import listed_mask, live_mask, lowest
from vtoken_jax.sampling import make_draws

__all__ = ["JaxRunner"]

_MIN_CHUNK = 16
_MIN_DECODES_BESIDE_CHUNKS = 4
_MIN_SCORES = 256
_DECODE_WIDTHS, _CHUNK_WIDTHS = 4, 2
"""Widths an octave: padding costs a decode step more than a chunk, whose shapes are many and take longer to compile."""


class RowStore(JaxKVStore):
    """A store that remembers how many blocks it was given for each row: a step looks at no more."""

    def __init__(self, spec: KVSpec, device: jax.Device | None) -> None:
        super().__init__(spec, device)
        self.num_blocks = [0] * spec.max_num_reqs

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        super().set_row(row, block_ids, live_words)
        self.num_blocks[row] = len(block_ids)


class JaxRunner:
    """``ModelRunner`` of one model. The pool and the masses are donated at each step: nobody else may hold them.

    Args:
        config: of the model.
        dtype: of its weights and of the pool.
        weights: the leaves of its state, as ``load_weights`` gives it.
        implementation: of attention at decode, as in ``vtoken_jax.kernels.decode.paged_decode``.
        device: of weights, pool and masses, one of ``jax.devices()``; None is JAX's default.
        eos_token_ids: tokens with which the model ends a text, if they are known; no step depends on them.

    Raises:
        SpecError: the device is none of this process.
    """

    store: RowStore
    kernel: Implementation
    """What ``implementation`` comes to on this device and for the store's shape."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DType,
        weights: tuple[jax.Array, ...],
        implementation: Implementation = "auto",
        device: jax.Device | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.dtype = dtype
        self.device = checked_device(device)
        self.weights = made_on(device, lambda: weights)
        self.implementation = implementation
        self.max_positions = config.max_positions
        self.need: MassNeed | None = None
        self.masses: jax.Array | None = None
        self.queries: dict[int, tuple[Position, Position]] = {}
        """For each row the positions, from and to, of the queries whose mass was added."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: DType,
        implementation: Implementation = "auto",
        device: jax.Device | None = None,
    ) -> "JaxRunner":
        """Loads a Hugging Face folder. Raises SpecError, as ``ModelConfig`` and ``load_weights`` do."""
        config, in_tiles = ModelConfig.from_folder(folder), tiles_pay(platform_of(checked_device(device)), dtype)
        eos_token_ids = read_eos_token_ids(folder)
        state = made_on(device, lambda: load_weights(folder, config, dtype, in_tiles=in_tiles)[1])
        return cls(config, dtype, tuple(jax.tree.leaves(state)), implementation, device, eos_token_ids)

    def make_store(self, spec: KVSpec) -> RowStore:
        self.config.check_spec(spec)
        if spec.dtype != self.dtype:
            raise SpecError(f"the pool's dtype is {spec.dtype}, the model's {self.dtype}: make both the same")
        self.kernel = choose(
            self.implementation,
            kv_dtype=self.dtype,
            head_size=spec.head_size,
            block_size=spec.block_size,
            platform=platform_of(self.device),
        )
        self.store = RowStore(spec, self.device)
        self.queries.clear()
        if self.need is not None:
            self.collect_mass(self.need)
        return self.store

    def collect_mass(self, need: MassNeed) -> None:
        self.need = need
        num_rows = self.store.spec.max_num_reqs
        self.masses = made_on(self.device, lambda: make_masses(need, num_rows, self.max_positions))

    def limit_positions(self, max_positions: int) -> None:
        """No request will be longer than this: mass is kept for so many positions. Before the first step."""
        self.max_positions = max_positions
        if self.need is not None:
            self.collect_mass(self.need)

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        segments, order = self._pack(rows)
        has_chunks = any(len(row.token_ids) > 1 for row in rows)
        asked = [None if at is None or rows[at].sampling is None else rows[at] for at in order]
        draws, max_top_k = make_draws([row and (row.sampling, row.num_sampled) for row in asked])  # type: ignore[misc]
        spec = self.store.spec
        self.store.cache, self.masses, tokens = run_step(
            self.weights,
            self.store.cache,
            self.masses,
            self.store.tables,
            segments,
            draws,
            config=self.config,
            dtype=self.dtype,
            need=self.need and replace(self.need, rows=False),  # how rows are read is no matter of the step
            num_blocks=self._width([row.row for row in rows], _CHUNK_WIDTHS if has_chunks else _DECODE_WIDTHS),
            block_size=spec.block_size,
            max_top_k=max_top_k,
            implementation=self.kernel,
        )
        for row in rows if self.need is not None else ():
            first, _ = self.queries.get(row.row, (row.start, 0))
            self.queries[row.row] = first, row.start + len(row.token_ids)
        if not any(asked):
            return []  # nobody waits for the device
        chosen = dict(zip(order, np.asarray(tokens).tolist(), strict=True))
        return [chosen[at] for at, row in enumerate(rows) if row.sampling is not None]

    def scores(self, row: int, positions: Sequence[Position]) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        need, masses = self._kept()
        first, end = self.queries.get(row, (0, 0))
        places = np.asarray(positions, np.int32)
        padded = pad(places, bucket(len(places), _MIN_SCORES), 0)
        found = np.asarray(read_masses(masses, row, padded, summed=not need.rows))[..., : len(places)]
        layers = found.reshape(-1, len(places))
        mass = np.where(places < end, layers.sum(axis=0), nan)
        queries = range(max(first, end - need.window), end) if need.rows else ()
        by_query = [np.where(places <= query, layers[query % need.window], nan) for query in queries]
        return mass.tolist(), [each.tolist() for each in by_query]

    def lowest(self, row: int, positions: Sequence[Position] | None, choice: Choice) -> list[Position]:
        """``RanksOnDevice``: scores, smoothing and choice on the device."""
        need, masses = self._kept()
        first, end = self.queries.get(row, (0, 0))
        num_positions = min(bucket(end, _MIN_SCORES), masses.shape[-1])
        queries = np.full(masses.shape[1], -1, np.int32)
        for query in range(max(first, end - need.window), end):
            queries[query % need.window] = query
        spans = pad(np.asarray(choice.spans, np.int32).reshape(-1, 2), bucket(len(choice.spans), 4), 0)
        chosen, is_chosen = lowest(
            masses,
            row,
            self._candidates(row, positions, num_positions),
            queries,
            end,
            spans,
            score=choice.score,
            smooth=choice.smooth,
            count=bucket(choice.count, 16),
        )
        found: list[Position] = np.asarray(chosen)[np.asarray(is_chosen)][: choice.count].tolist()
        return sorted(found)

    def _candidates(self, row: int, positions: Sequence[Position] | None, num_positions: int) -> jax.Array:
        """``[num_positions]`` bool."""
        if positions is None:
            spec, num_blocks = self.store.spec, self._width([row], _CHUNK_WIDTHS)
            shape = {"block_size": spec.block_size, "num_blocks": num_blocks, "num_positions": num_positions}
            mask: jax.Array = live_mask(self.store.tables, self.store.cache.positions, row, **shape)
            return mask
        places = np.asarray(positions, np.int32)
        padded = pad(places, bucket(len(places), _MIN_SCORES), num_positions)
        listed: jax.Array = listed_mask(padded, num_positions=num_positions)
        return listed

    def _kept(self) -> tuple[MassNeed, jax.Array]:
        if self.need is None or self.masses is None:
            raise SpecError("no mass is kept: call collect_mass before the first step")
        return self.need, self.masses

    def forget(self, row: int) -> None:
        if self.queries.pop(row, None) is not None and self.masses is not None:
            self.masses = clear_row(self.masses, row)

    def _pack(self, rows: Sequence[StepRow]) -> tuple[tuple[Segment, ...], list[int | None]]:
        """Segments, and which row each of their rows is; None is padding."""
        segments, order = [], []
        decodes = [at for at, row in enumerate(rows) if len(row.token_ids) == 1]
        chunks = [at for at, row in enumerate(rows) if len(row.token_ids) > 1]
        for members in filter(None, (decodes, chunks)):
            num_tokens = max(len(rows[at].token_ids) for at in members)
            width = 1 if num_tokens == 1 else bucket(num_tokens, _MIN_CHUNK)
            # Beside a chunk a few rows more cost little, and a shape more to compile costs seconds. Never one token
            # alone: XLA's CPU backend turns a scatter of one row into an update that copies the whole plane.
            least = 1 if width > 1 else _MIN_DECODES_BESIDE_CHUNKS if chunks else 2
            height = bucket(len(members), least)
            segments.append(self._segment([rows[at] for at in members], height, width))
            order += [*members, *[None] * (height - len(members))]
        return tuple(segments), order

    def _segment(self, rows: Sequence[StepRow], height: int, width: int) -> Segment:
        spec = self.store.spec
        token_ids = np.zeros((height, width), np.int32)
        positions = np.full((height, width), PAD_POSITION, np.int32)
        slots = np.full((height, width), spec.num_slots, np.int32)
        table_rows = np.full(height, spec.max_num_reqs, np.int32)
        counts = np.zeros(height, np.int32)
        for index, row in enumerate(rows):
            count = len(row.token_ids)
            token_ids[index, :count] = row.token_ids
            positions[index, :count] = range(row.start, row.start + count)
            slots[index, :count] = row.slots
            table_rows[index], counts[index] = row.row, count
        arrays: Any = (token_ids, positions, slots, table_rows, counts)  # jit takes NumPy's as they are
        return Segment(*arrays)

    def _width(self, rows: Sequence[int], widths_an_octave: int) -> int:
        """Blocks of each row that a call looks at."""
        size = self.store.spec.block_size
        most = max(self.store.num_blocks[row] for row in rows)
        return min(self.store.spec.num_blocks - 1, cdiv(width_bucket(most * size, widths_an_octave), size))
