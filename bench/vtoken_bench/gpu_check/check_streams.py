"""The copy engine on real streams: decode, moves and KV writes that would clash if one wait were missing."""

from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from vtoken.executor import KVSpec
from vtoken_bench.gpu_check.ground import Ground
from vtoken_bench.gpu_check.on_device import copy_device, settle
from vtoken_bench.gpu_check.twin_pool import TwinPool
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.device import CopyDevice, Event
from vtoken_torch.kernels import move
from vtoken_torch.kernels.planes import KVPlanes

__all__ = ["check_streams"]

_DELAY_CYCLES: Final = 50_000_000
"""Some 25 milliseconds: longer than a step takes host and device, so that whoever does not wait is early."""

_Late = Literal["copies", "writes"]


def check_streams(ground: Ground) -> None:
    """Both regimes give the twin's KV and outputs, whatever is late; an engine without one of the waits does not."""
    lates: tuple[_Late, ...] = ("copies", "writes")
    for own_stream, late in (*((True, late) for late in lates), (False, lates[0])):
        name = f"{'own' if own_stream else 'compute'} stream, late {late}"
        program = _Program(ground, CUDACopyEngine, own_stream, late)
        program.run()
        ground.check(f"{name}: KV equal, bit for bit", program.is_equal())
        outputs = torch.stack(program.outputs).double().cpu().numpy()
        ground.close(f"{name}: decode beside moves", outputs, program.expected().numpy(), "bfloat16")
        engine = program.engine
        ground.check(f"{name}: all fences are passed", engine.passed() == program.last_fence)
        ground.check(f"{name}: all moves were launched", engine.num_moves == program.num_moves > 0)
    deaf = _Program(ground, _Deaf, True, "copies")
    deaf.run()
    ground.check("control: KV writes that do not wait for copies are found", not deaf.is_equal())
    if ground.is_dry:
        ground.notes.append("not rehearsed: copies that do not wait for the forward; here it is always done")
        return
    hasty = _Program(ground, _Hasty, True, "writes")
    hasty.run()
    ground.check("control: copies that do not wait for the forward are found", not hasty.is_equal())


class _Deaf(CUDACopyEngine):
    """Lets the next step's KV writes overtake the copies."""

    def wait(self) -> None:
        pass


class _Hasty(CUDACopyEngine):
    """Lets copies overtake the forward."""

    def forward_done(self) -> Event:
        return self._device.make_event()  # never recorded: nobody waits for it


class _Program:
    """Steps of a serving loop: write the step's tokens, decode, move live tokens to dead slots.

    The next tokens are written where the moved ones came from.
    """

    def __init__(self, ground: Ground, engine: type[CUDACopyEngine], own_stream: bool, late: _Late) -> None:
        self._ground = ground
        self._is_late_to_write = late == "writes" and not ground.is_dry
        self._num_steps, num_blocks = (2, 2) if ground.is_dry else (12, 8)
        num_reqs = 1 if ground.is_dry else 8
        spec = KVSpec(
            num_layers=1 if ground.is_dry else 2,
            num_kv_heads=2,
            num_query_heads=4,
            head_size=8 if ground.is_dry else 64,
            dtype="bfloat16",
            block_size=16,
            num_blocks=1 + num_reqs * num_blocks,
            max_num_reqs=num_reqs,
        )
        self.pool = TwinPool(spec, num_blocks, ground.device)
        self._blocks = self.pool.rng.permutation(np.arange(1, spec.num_blocks)).reshape(num_reqs, num_blocks)
        self._alive = self.pool.rng.random((num_reqs, num_blocks, 16)) < 0.5
        self._written = np.zeros(0, np.int64)
        self._device: CopyDevice = copy_device(ground.device)
        mover = partial(_move, KVPlanes.of_cache(self.pool.cache), late == "copies" and not ground.is_dry)
        self.engine = engine(self._device, mover, own_stream=own_stream)
        self.outputs: list[Tensor] = []
        self._asked: list[tuple[Tensor, Tensor, Tensor]] = []  # queries; the twin's KV and tables at that time
        self.num_moves = self.last_fence = 0

    def run(self) -> None:
        """All steps; then the device is idle."""
        for _ in range(self._num_steps):
            self._step()
        settle(self._device)
        if not self._ground.is_dry:
            torch.cuda.synchronize()

    def is_equal(self) -> bool:
        """Whether the device's cache is the twin's."""
        return torch.equal(self.pool.cache.bits.cpu(), self.pool.twin.bits)

    def expected(self) -> Tensor:
        """Outputs of all steps. Only at the end, for the host has to keep ahead of the device; the twin goes back."""
        outputs = []
        for queries, bits, tables in self._asked:
            self.pool.twin.bits.copy_(bits)
            self.pool.twin_tables.state.copy_(tables)
            outputs.append(self.pool.expected(queries)[0])
        return torch.stack(outputs)

    def _step(self) -> None:
        self.engine.wait()
        if type(self.engine) is CUDACopyEngine:
            settle(self._device)
        self._write(torch.from_numpy(self._written))
        self._decode()
        src, dst = self._choose_moves()
        self.engine.launch(src.tolist(), dst.tolist(), self.engine.forward_done())
        self.last_fence = self.engine.fence()
        self.num_moves += len(src)
        self._written = src
        self.pool.twin.bits[:, dst] = self.pool.twin.bits[:, src]

    def _write(self, slots: Tensor) -> None:
        """New KV, over what the last copies read."""
        tokens = self.pool.new_tokens(len(slots))
        places, bits = self._up(slots), self._up(tokens)
        if self._is_late_to_write:
            torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]  # copies that do not wait come first
        self.pool.cache.bits[:, places] = bits
        self.pool.twin.bits[:, slots] = tokens

    def _decode(self) -> None:
        pool = self.pool
        for row, (blocks, alive) in enumerate(zip(self._blocks, self._alive, strict=True)):
            pool.set_row(row, blocks.tolist(), [int(word) for word in alive @ (1 << np.arange(16))])
        queries = pool.new_queries()
        out = torch.empty(queries.shape, dtype=torch.float32, device=self._ground.device)
        pool.decode(self._up(queries), out)
        self.outputs.append(out)
        pool.twin_tables.flush()
        self._asked.append((queries, pool.twin.bits.clone(), pool.twin_tables.state.clone()))

    def _up(self, tensor: Tensor) -> Tensor:
        """On the device, and the host waits for nothing: it has to run ahead."""
        return tensor if self._ground.is_dry else tensor.pin_memory().to("cuda", non_blocking=True)

    def _choose_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Some live tokens to as many dead slots of the same requests; the slots that they leave live on."""
        live, dead = [], []
        for blocks, alive in zip(self._blocks, self._alive, strict=True):
            slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1)
            flat = alive.reshape(-1)
            count = max(1, min(flat.sum(), (~flat).sum()) // 8)
            places = self.pool.rng.permutation(np.flatnonzero(~flat))[:count]
            live.append(self.pool.rng.permutation(slots[flat])[:count])
            dead.append(slots[places])
            flat[places] = True
        return np.concatenate(live), np.concatenate(dead)


def _move(planes: KVPlanes, is_late: bool, src: Tensor, dst: Tensor, count: Tensor) -> None:
    if is_late:
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]  # writes that do not wait come first
    move.move_tokens(planes, src, dst, count)
