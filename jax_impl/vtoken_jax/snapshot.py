"""Snapshots of a running engine by orbax: KV pool, tables, mass and the whole state of the loop, all of one moment.

A draw of a request depends on its seed and on how many it has drawn, so that nothing else is needed of randomness. What
is written is complete: an engine of the same model, pool and configuration goes on with the same tokens, victims and
fingerprints. Weights are not in it, only a sum of their bits, by which others are told apart.
"""

import zlib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from vtoken.block_pool import BlockPool
from vtoken.errors import SpecError
from vtoken.eviction import Counters, Running
from vtoken.request_table import RequestTable
from vtoken.serving.protocol import SamplingParams
from vtoken.serving.requests import Request
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.victims import PolicyVictims, TraceVictims, VictimSource
from vtoken_jax import checkpoint
from vtoken_jax.device_tables import Tables
from vtoken_jax.kv_cache import KVCache, storage_dtype
from vtoken_jax.plain_data import decode, encode
from vtoken_jax.runner import JaxRunner

if TYPE_CHECKING:
    from vtoken_jax.engine import JaxEngine

__all__ = ["FORMAT", "load_snapshot", "save_snapshot"]

FORMAT = "vtoken-jax/snapshot/3"

Fact: TypeAlias = str | dict[str, str]
"""A value as text, or those of its fields by name."""

_PLAIN = (BlockPool, Counters, Request, RequestTable, Running, SamplingParams, TraceEvent, VictimTrace)


def save_snapshot(folder: Path, engine: "JaxEngine") -> None:
    """Writes a new folder. Raises SpecError if it exists, or cannot be written."""
    meta = {
        "format": FORMAT,
        "vtoken": version("vtoken"),
        "engine": _facts(engine),
        "host": {name: _read(part, names) for name, part, names in _host_parts(engine)},
    }
    # Copies: the next step donates the arrays.
    checkpoint.save(folder, meta, [leaf.copy() for leaf in jax.tree.leaves(_arrays(engine.runner))])


def load_snapshot(folder: Path, engine: "JaxEngine") -> None:
    """Goes on where a snapshot was taken.

    Raises:
        SpecError: no snapshot, a torn one, one of another format, or of another model, pool or configuration, or of
            other weights; nothing is changed.
    """
    meta = checkpoint.load_meta(folder, FORMAT)
    for name, ours in _facts(engine).items():
        theirs = meta["engine"].get(name)
        if theirs != ours:
            raise SpecError(f"the snapshot {folder} has another {name}: {_difference(theirs, ours)}: make it the same")
    host = {name: decode(data, _PLAIN) for name, data in meta["host"].items()}
    parts = list(_host_parts(engine))
    if any(host.get(name, {}).keys() != set(names) for name, _, names in parts):
        raise SpecError(f"the snapshot {folder} was written by vtoken {meta['vtoken']}, whose engine keeps other state")
    state = _arrays(engine.runner)
    leaves = checkpoint.load_arrays(folder, jax.tree.leaves(state))
    for name, part, names in parts:
        for key in names:
            setattr(part, key, host[name][key])
    _share_past(engine)
    store, runner = engine.runner.store, engine.runner
    store.cache, store.tables, runner.masses = jax.tree.unflatten(jax.tree.structure(state), leaves)


def _arrays(runner: JaxRunner) -> tuple[KVCache, Tables, jax.Array | None]:
    return runner.store.cache, runner.store.tables, runner.masses


def _facts(engine: "JaxEngine") -> dict[str, Fact]:
    """What must be the same in both engines."""
    loop, runner = engine.loop, engine.runner
    return {
        "model": _fields(runner.config),
        "set of weights": f"bit sum {int(_bit_sum(runner.weights)):#010x}",
        "pool": _fields(runner.store.spec),
        "config": _fields(loop.config),
        "source of victims": _source(loop.scheduler.victims),
        "mass": repr(runner.need),
        "chunk_tokens": repr(loop.batch.chunk_tokens),
        "max_num_seqs": repr(loop.batch.max_num_seqs),
        "max_model_len": repr(engine.max_model_len),
        "prefix_caching": repr(loop.batch.share_prefixes),
    }


def _fields(settings: Any) -> dict[str, str]:
    return {field.name: repr(getattr(settings, field.name)) for field in fields(settings)}


def _difference(theirs: Fact | None, ours: Fact) -> str:
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return f"{theirs} there, {ours} here"
    unlike = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name}={theirs.get(name)} there, {ours.get(name)} here" for name in unlike)


def _source(victims: VictimSource) -> str:
    """Which policy chooses, or which trace is replayed: a place in one means nothing in another."""
    if isinstance(victims, TraceVictims):
        events = [event for _, each in sorted(victims._trace.events.items()) for event in each]
        return f"a trace of {len(events)} events, CRC-32 {zlib.crc32(repr(events).encode()):#010x}"
    policy = type(victims.policy) if isinstance(victims, PolicyVictims) else type(victims)
    return f"{policy.__module__}.{policy.__qualname__}"


@jax.jit
def _bit_sum(weights: tuple[jax.Array, ...]) -> jax.Array:
    """A uint32 of all bits, wrapping; the order of the arrays counts, that of the elements in each does not.

    Thus weights in tiles have the sum of those that are not.
    """
    total: jax.Array = jnp.uint32(0)
    for weight in weights:
        bits = jax.lax.bitcast_convert_type(weight, storage_dtype(weight.dtype.itemsize))
        total = total * jnp.uint32(31) + jnp.sum(bits, dtype=jnp.uint32)
    return total


def _host_parts(engine: "JaxEngine") -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Objects, and those of their attributes that change from step to step."""
    loop, runner = engine.loop, engine.runner
    pool, scheduler, victims = loop.pool, loop.scheduler, loop.scheduler.victims
    yield "loop", loop, ("_num_submitted",)
    yield "batch", loop.batch, ("waiting", "running")
    yield "pool", pool, ("pool", "_rows", "_free_rows", "_in_flight", "_step")
    yield "tables", pool.tables, ("_tables",)
    yield "scheduler", scheduler, ("counters", "_running", "_step")
    yield "manager", scheduler.manager, ("num_plans", "num_moves", "refused", "_last_attempt", "_last_release")
    yield "runner", runner, ("queries",)
    yield "store", runner.store, ("num_blocks",)
    yield "trace", engine.trace, ("events",)
    if isinstance(victims, PolicyVictims):
        yield "victims", victims, ("_last_count", "_past", "_rebuild_to")
        yield "repeat", victims._repeat, ("_next",)
    if isinstance(victims, TraceVictims):
        yield "victims", victims, ("_next",)


def _share_past(engine: "JaxEngine") -> None:
    """The past that a policy's source adds to is the one that it repeats from."""
    victims = engine.loop.scheduler.victims
    if isinstance(victims, PolicyVictims):
        victims._repeat._trace = victims._past


def _read(part: object, names: tuple[str, ...]) -> Any:
    return encode({name: getattr(part, name) for name in names}, _PLAIN)
