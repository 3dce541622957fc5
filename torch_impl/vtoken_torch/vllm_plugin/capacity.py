"""How many tokens a request has live at most, and whether the pool can ever hold them (SPEC M-2).

Imports neither vLLM nor torch: the processes that take requests ask here too.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any, Self

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.reclamation.admission import Answer, PoolCounters, admission
from vtoken.types import cdiv
from vtoken_torch.vllm_plugin.lazy.bound import headroom_blocks, num_slots_with_holes
from vtoken_torch.vllm_plugin.on_cuda import mass_refusal
from vtoken_torch.vllm_plugin.options import PluginOptions, request_config, usable_policy

__all__ = ["Capacity", "LiveBound", "draft_refusal"]


def draft_refusal(config: VTokenConfig) -> str | None:
    """Why a policy cannot run beside speculative decoding; None if it can."""
    if not usable_policy(config.policy).signals:
        return None
    return (
        f"policy={config.policy!r} scores tokens by attention, where refused drafts would count: use a policy "
        "without scores ('streaming_llm', 'random'), or an engine without speculative decoding"
    )


@dataclass(frozen=True, slots=True)
class LiveBound:
    """Most tokens that one request has live at once.

    After each chunk, and every ``interval`` tokens in decode, the policy brings it to what it keeps: the budget, or
    what may never be chosen where that is more. Without a policy, and in the variants that move nothing, every token
    counts. In lazy mode holes count that no plan closes.

    Attributes:
        config: the request's.
        kept: tokens that its policy never gives, whatever the budget.
        chunk: tokens between two evictions while the prompt is computed; later it is the ``interval``.
        block_size: tokens a block.
    """

    config: VTokenConfig
    kept: int
    chunk: int
    block_size: int

    @classmethod
    def of(cls, config: VTokenConfig, prompt_len: int, chunk: int, block_size: int, mass_every: int = 1) -> Self:
        """``chunk``: tokens that one step of the prefill writes at most; ``mass_every``: as in ``PluginOptions``."""
        num_unscored = mass_every if mass_every > 1 and usable_policy(config.policy).signals else 0
        kept = replace(config, recent=max(config.recent or 0, num_unscored)).kept_tokens(sys.maxsize, prompt_len)
        if config.policy == "snapkv":  # chooses nothing before the prompt's end
            kept = max(kept, prompt_len)
        if config.policy == "paged_eviction":  # whole pages alone: the newest tokens and each span may hold two more
            num_spans = 1 if config.protected == "prompt" else len(config.protected)
            kept += 2 * config.page_size * (num_spans + 2)
        return cls(config, kept, chunk, block_size)

    @property
    def is_bounded(self) -> bool:
        """Whether evictions keep the request below its length at all."""
        return self.config.variant == "vtoken" and self.config.policy != "none"

    def at(self, num_tokens: int, is_decode: bool = False) -> int:
        """The bound on the way to ``num_tokens`` computed ones; ``is_decode``: on what is left of the way."""
        if not self.is_bounded:
            return num_tokens
        growth = self.config.interval if is_decode else max(self.config.interval, self.chunk)
        num_live = min(num_tokens, max(self.kept, self.config.budget_tokens(num_tokens)) + growth)
        if self.config.mode == "eager":
            return num_live
        return min(num_tokens, num_slots_with_holes(self.config, num_live, self.block_size))


@dataclass(frozen=True, slots=True)
class Capacity:
    """One engine's pool, and what its requests may ask of it.

    The chunks of a request that evicts shrink to what is free, so that it needs room for one block beside what it
    keeps, whatever vLLM's chunk size is.

    Attributes:
        default: the engine's configuration.
        block_size: tokens a block.
        num_blocks: blocks that requests can have; the null block is not among them.
        step_tokens: tokens of one step, so of one chunk.
        max_model_len: positions of one request.
        has_drafts: speculative decoding is on.
        mass_every: as in ``PluginOptions``.
        mass_refusal: why no policy that looks at attention can run; None if it can.
    """

    default: VTokenConfig
    block_size: int
    num_blocks: int
    step_tokens: int
    max_model_len: int
    has_drafts: bool = False
    mass_every: int = 1
    mass_refusal: str | None = None

    @classmethod
    def of(cls, vllm_config: Any, options: PluginOptions, num_blocks: int) -> Self:
        """``num_blocks``: the pool's, the null block included."""
        scheduler = vllm_config.scheduler_config
        return cls(
            default=options.config,
            block_size=vllm_config.cache_config.block_size,
            num_blocks=num_blocks - 1,
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
            has_drafts=vllm_config.speculative_config is not None,
            mass_every=options.mass_every,
            mass_refusal=mass_refusal(vllm_config),
        )

    def bound(self, config: VTokenConfig, prompt_len: int) -> LiveBound:
        """The bound on a request's live tokens."""
        chunk = min(self.step_tokens, self.block_size)
        return LiveBound.of(config, prompt_len, chunk, self.block_size, self.mass_every)

    @property
    def headroom(self) -> int:
        """Blocks that are kept free for evacuation; none in eager mode."""
        return headroom_blocks(self.default, self.num_blocks)

    def policy_refusal(self, config: VTokenConfig) -> str | None:
        """Why a request's policy cannot run in this engine; None if it can."""
        if self.mass_refusal is not None and usable_policy(config.policy).signals:
            return f"policy={config.policy!r}: {self.mass_refusal}"
        return draft_refusal(config) if self.has_drafts else None

    def refusal(self, config: VTokenConfig, prompt_len: int, total_len: int) -> str | None:
        """Why a request never fits, with both numbers and the remedy; None if it does."""
        live = self.bound(config, prompt_len).at(total_len)
        empty = PoolCounters(self.num_blocks, self.num_blocks, reclaimable=0, in_flight=0, headroom=self.headroom)
        verdict = admission(empty, needed_blocks=0, worst_case_blocks=cdiv(live, self.block_size))
        if verdict.answer is not Answer.NEVER_FITS:
            return None
        return (
            f"{verdict.reason} (blocks of {self.block_size} tokens; {live} live at most of {prompt_len} prompt tokens "
            f"and up to {total_len - prompt_len} new ones, policy {config.policy!r})"
        )

    def check(self, extra_args: Any, prompt_len: int, max_tokens: int | None) -> None:
        """Raises SpecError for a request with bad settings, or one that never fits."""
        config = request_config(extra_args, self.default)
        unfit = self.policy_refusal(config)
        if unfit is not None:
            raise SpecError(unfit)
        longest = self.max_model_len - prompt_len
        max_tokens = longest if max_tokens is None else min(max_tokens, longest)
        reason = self.refusal(config, prompt_len, prompt_len + max(max_tokens, 0))
        if reason is not None:
            raise SpecError(f"max_tokens={max_tokens}: {reason}")
