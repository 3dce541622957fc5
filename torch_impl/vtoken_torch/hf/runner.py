"""A transformers model with its KV pool on one device, behind the serving protocol."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.policies.base import MassNeed
from vtoken.policies.ranking import Choice
from vtoken.serving.protocol import StepRow
from vtoken.types import Position
from vtoken_torch.hf.cache import PagedCache
from vtoken_torch.hf.geometry import probe
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.hf.plan import MakeDecode, StepPlan
from vtoken_torch.hf.sampling import sample
from vtoken_torch.kv_store import TorchKVStore
from vtoken_torch.upload import upload

__all__ = ["HFRunner"]


class HFRunner:
    """``ModelRunner`` and ``RanksOnDevice`` of one model.

    From here on the model's attention is vToken's; ``release`` gives it back. One runner serves one engine.

    Args:
        model: a causal language model of transformers, on its device and in its dtype, for inference.
        decode_kernel: whether rows that decode go through the Triton kernel; None: on CUDA they do.

    Raises:
        SpecError: the model's attention is not of the kind that can lose tokens; the message says why.
    """

    store: TorchKVStore

    def __init__(self, model: Any, decode_kernel: bool | None = None) -> None:
        self.model = model.eval()
        self._own_attention = model.config._attn_implementation
        self.geometry = probe(model)
        self._decode_kernel = model.device.type == "cuda" if decode_kernel is None else decode_kernel
        self._make_decode: MakeDecode | None = None
        self._need: MassNeed | None = None
        self._book: MassBook | None = None

    def release(self) -> None:
        """The model attends as it did before."""
        self.model.set_attn_implementation(self._own_attention)

    def make_store(self, spec: KVSpec) -> TorchKVStore:
        self.geometry.check_spec(spec)
        self.store = TorchKVStore(spec, self.model.device)
        self._cache = PagedCache(self.store.cache)
        self._prepare()
        return self.store

    def collect_mass(self, need: MassNeed) -> None:
        self._need = need
        if hasattr(self, "store"):
            self._prepare()

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> list[int]:
        return sample(self.logits(rows), [(row.sampling, row.num_sampled) for row in rows if row.sampling is not None])

    @torch.inference_mode()
    def logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """The forward pass of ``step``: logits ``[n, vocab_size]`` of the rows that have ``sampling``, in order."""
        book = self._book
        self.store.settle()  # what was moved is there before the first KV write (INV-3)
        plan = StepPlan(self.store, self._cache, rows, self._need, self._make_decode)
        output = self.model(
            input_ids=plan.token_ids.view(plan.shape),
            position_ids=plan.positions.view(plan.shape),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=plan.keep,
            vtoken=plan,
        )
        if book is not None:
            for row in rows:
                book.expect(row.row, row.start, len(row.token_ids))
            plan.report(book)
        return plan.wanted(output.logits)

    @torch.inference_mode()
    def scores(self, row: int, positions: Sequence[Position]) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        return self._known_book().scores(row, positions)

    @torch.inference_mode()
    def lowest(self, row: int, positions: Sequence[Position] | None, choice: Choice) -> list[Position]:
        """``RanksOnDevice``: victims chosen where the mass lies; only they come to the host."""
        if positions is None:
            self.store.settle()
            slots, _ = self.store.tables.find_live([row])
            candidates = self.store.cache.positions[slots].long().sort().values
        else:
            candidates = upload(positions, self.model.device)
        return self._known_book().lowest(row, candidates, choice)

    @torch.inference_mode()
    def forget(self, row: int) -> None:
        if self._book is not None:
            self._book.forget(row)

    def _prepare(self) -> None:
        need, store = self._need, self.store
        self._book = MassBook(need, store.spec.max_num_reqs, self.model.device) if need else None
        if self._decode_kernel:  # Triton is not everywhere
            from vtoken_torch.hf.kernel_segment import KernelSegment, Scratch

            self._make_decode = partial(KernelSegment, store=store, scratch=Scratch(store, need), need=need)

    def _known_book(self) -> MassBook:
        if self._book is None:
            raise SpecError("no mass is kept: call collect_mass before the first step")
        return self._book
