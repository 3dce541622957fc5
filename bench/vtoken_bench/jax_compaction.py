"""A picture of compaction in JAX's donated buffers: where tokens lie before and after one call, and what it allocates.

``python -m vtoken_bench.jax_compaction FILE.svg``. Slots and pointers are read from the executor's arrays, bytes from
the compiled programs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken_bench.plot import FORMATS

if TYPE_CHECKING:
    from vtoken.executor import KVSpec
    from vtoken.types import Move, Position, ReqId, SlotId
    from vtoken_jax.executor import JaxExecutor

__all__ = ["Allocation", "Compaction", "draw_compaction", "jax_compaction", "record_allocations", "record_compaction"]

_BLOCK_SIZE, _NUM_BLOCKS = 8, 9
_COLOURS = {"a": "#8fb4d9", "b": "#e6c98f"}
_DEAD, _MOVED = "#eceff3", "#d9822b"
_POOL_BLOCKS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Compaction:
    """One plan of request ``a``, launched.

    Attributes:
        before, after: slot to the live token in it.
        moves: what the plan copied.
        num_arrays, num_in_place: arrays of the pool, and how many of them begin at the same address afterwards.
    """

    before: "dict[SlotId, tuple[ReqId, Position]]"
    after: "dict[SlotId, tuple[ReqId, Position]]"
    moves: "tuple[Move, ...]"
    num_arrays: int
    num_in_place: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes that one call allocates beside the pool, for pools of ``pool_bytes``."""

    label: str
    pool_bytes: tuple[int, ...]
    new_bytes: tuple[int, ...]


def jax_compaction(image_format: str) -> bytes:
    """The whole picture."""
    return draw_compaction(record_compaction(), record_allocations(), image_format)


def record_compaction() -> Compaction:
    """Two requests in a small pool, one of which has lost half of its tokens here and there."""
    import jax

    from vtoken.reclamation.fill import FillPlanner
    from vtoken_jax.executor import JaxExecutor

    executor = JaxExecutor()
    spec = _spec(_BLOCK_SIZE, _NUM_BLOCKS)
    executor.allocate(spec)
    for req_id, num_tokens in (("a", 20), ("b", 13), ("a", 15)):
        if req_id not in executor.tables:
            executor.admit(req_id)
        executor.append(req_id, num_tokens, bytes(num_tokens * spec.token_bytes))
    executor.kill("a", [position for position in range(30) if position * 7 % 10 < 6])
    store: Any = executor.store
    before, addresses = _live(executor), _addresses(jax.tree.leaves(store.cache))
    plan = FillPlanner().plan(executor.table_view("a"), executor.pool_view())
    if plan is None:
        raise AssertionError("nothing to compact: the pool of the picture has no holes")
    executor.launch(plan)
    after = _addresses(jax.tree.leaves(store.cache))
    same = sum(old == new for old, new in zip(addresses, after, strict=True))
    return Compaction(before, _live(executor), plan.moves, len(after), same)


def record_allocations() -> list[Allocation]:
    """What XLA plans for a move of 256 tokens and of 16, and for the same without donation."""
    import jax

    from vtoken_jax.compaction import move_tokens

    move: Any = move_tokens
    specs = [_spec(16, num_blocks) for num_blocks in _POOL_BLOCKS]
    pools = tuple(spec.num_slots * spec.token_bytes for spec in specs)
    programs = (
        ("256 tokens, not donated", jax.jit(move.__wrapped__), 256),
        ("256 tokens, donated", move, 256),
        ("16 tokens, donated", move, 16),
    )
    return [
        Allocation(label, pools, tuple(_new_bytes(function, spec, num_tokens) for spec in specs))
        for label, function, num_tokens in programs
    ]


def _spec(block_size: int, num_blocks: int) -> "KVSpec":
    from vtoken.executor import KVSpec

    return KVSpec(
        num_layers=2, num_kv_heads=3, num_query_heads=9, head_size=64, dtype="bfloat16", block_size=block_size,
        num_blocks=num_blocks,
    )  # fmt: skip


def _new_bytes(function: Any, spec: "KVSpec", num_tokens: int) -> int:
    import jax

    from vtoken_jax.kv_cache import make_cache

    slots: Any = jax.ShapeDtypeStruct
    slots = slots((num_tokens,), "int32")
    program = function.lower(jax.eval_shape(lambda: make_cache(spec)), slots, slots).compile()
    memory = program.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def _live(executor: "JaxExecutor") -> "dict[SlotId, tuple[ReqId, Position]]":
    found: dict[SlotId, tuple[ReqId, Position]] = {}
    for req_id, request in executor.observe().requests.items():
        slots = [
            block * _BLOCK_SIZE + offset
            for block, word in zip(request.block_ids, request.live_words, strict=True)
            for offset in range(_BLOCK_SIZE)
            if word >> offset & 1
        ]
        found |= {slot: (req_id, position) for slot, position in zip(slots, request.positions, strict=True)}
    return found


def _addresses(arrays: Sequence[Any]) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in arrays]


# -- drawing ---------------------------------------------------------------------------------------------------------


def draw_compaction(compaction: Compaction, allocations: Sequence[Allocation], image_format: str) -> bytes:
    """The pool before over the pool after, an arrow for each move; beside it bytes over the size of the pool.

    Raises:
        SpecError: the format is neither png nor svg.
    """
    import io

    from vtoken.errors import SpecError

    if image_format not in FORMATS:
        raise SpecError(f"image format {image_format!r}: choose one of {', '.join(FORMATS)}")
    import matplotlib as mpl
    from matplotlib.figure import Figure  # takes a second to import

    with mpl.rc_context({"svg.hashsalt": "vtoken", "font.size": 9}):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
        _draw_pools(left, compaction)
        _draw_allocations(right, allocations)
        picture = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(picture, format=image_format, dpi=150, metadata=metadata)
    return picture.getvalue()


_BEFORE, _AFTER = 3.0, 0.0
"""Heights of the two rows of blocks."""


def _draw_pools(axes: Any, compaction: Compaction) -> None:
    moved = {move.dst_slot for move in compaction.moves}
    _draw_pool(axes, compaction.before, _BEFORE, {move.src_slot for move in compaction.moves})
    _draw_pool(axes, compaction.after, _AFTER, moved)
    for move in compaction.moves:
        ends = (_x(move.dst_slot), _AFTER + 1.02), (_x(move.src_slot), _BEFORE - 0.02)
        axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": _MOVED, "linewidth": 0.9})
    freed = {slot // _BLOCK_SIZE for slot in compaction.before} - {slot // _BLOCK_SIZE for slot in compaction.after}
    for block in range(1, _NUM_BLOCKS):
        middle = _x(block * _BLOCK_SIZE + _BLOCK_SIZE // 2) - 0.5
        axes.text(middle, _BEFORE + 1.25, f"block {block}", ha="center")
        if block in freed:
            axes.text(middle, _AFTER - 0.45, "free again", ha="center", color=_MOVED)
    where = f"{compaction.num_in_place} of {compaction.num_arrays} arrays at the same address"
    axes.text(0, _BEFORE + 2.0, "before: live tokens of a (blue) and b (sand) by position; all other slots are grey")
    axes.text(0, _AFTER - 1.1, f"after one call: {len(compaction.moves)} tokens copied in every array; {where}")
    axes.set(xlim=(-0.5, _x(_NUM_BLOCKS * _BLOCK_SIZE)), ylim=(_AFTER - 1.4, _BEFORE + 2.5))
    axes.axis("off")


def _draw_pool(axes: Any, live: "dict[SlotId, tuple[ReqId, Position]]", height: float, marked: "set[SlotId]") -> None:
    for slot in range(_BLOCK_SIZE, _NUM_BLOCKS * _BLOCK_SIZE):  # block 0 is the null block
        req_id, position = live.get(slot, ("", ""))
        colour = _COLOURS.get(req_id, _DEAD)
        edge = {"ec": _MOVED, "linewidth": 1.2, "zorder": 3} if slot in marked else {"ec": "white", "linewidth": 0.6}
        axes.bar(_x(slot), 1.0, 0.92, bottom=height, color=colour, **edge)
        axes.text(_x(slot), height + 0.5, position, ha="center", va="center", fontsize=6, zorder=4)


def _x(slot: int) -> float:
    block, offset = divmod(slot, _BLOCK_SIZE)
    return (block - 1) * (_BLOCK_SIZE + 0.8) + offset


def _draw_allocations(axes: Any, allocations: Sequence[Allocation]) -> None:
    for allocation in allocations:
        megabytes = [[size / 1e6 for size in sizes] for sizes in (allocation.pool_bytes, allocation.new_bytes)]
        axes.plot(*megabytes, "o-", label=allocation.label, markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    pools = [size / 1e6 for size in allocations[0].pool_bytes]
    axes.set_xticks(pools, [f"{size:.0f}" for size in pools])
    axes.set(xlabel="pool, MB", ylabel="allocated by one call, MB", title="What a move costs in memory")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_bytes(jax_compaction(path.suffix.removeprefix(".")))
