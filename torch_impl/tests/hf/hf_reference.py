"""The same tokens through transformers alone: eager attention, its own cache, and masks made from a victim trace.

Nothing of vToken's tables, plans or kernels is used: what was dead when is read from the trace (SPEC K-2, K-4).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from vtoken.policies import MassNeed, MassRecorder
from vtoken.trace import TraceEvent

Step = tuple[int, int]
"""Positions that a step wrote, from and to."""


@dataclass
class Replay:
    """Attributes:
    tokens: greedy, one for each step that ends at or behind the prompt's end.
    logits: ``[len(tokens), vocab_size]``.
    recorder: attention mass, if it was asked for.
    """

    tokens: list[int]
    logits: torch.Tensor
    recorder: MassRecorder | None


def dead_tokens(events: Iterable[TraceEvent], step: Step) -> set[int]:
    """Who is dead in a step: chosen at or before its start, with a death that its tokens pass."""
    start, end = step
    chosen = [event for event in events if event.at_computed <= start]
    return {victim for each in chosen for victim, count in zip(each.chosen, each.died, strict=True) if count < end}


@torch.inference_mode()
def replay(
    model: Any,
    tokens: Sequence[int],
    steps: Sequence[Step],
    events: Sequence[TraceEvent],
    is_sampled: Sequence[bool],
    need: MassNeed | None = None,
) -> Replay:
    """Runs one request's steps; a step that starts at 0 again is a rebuild after a preemption."""
    cache, logits = DynamicCache(), []
    recorder = MassRecorder(need) if need else None
    if steps[0][0]:  # a shared prefix, computed by another
        steps, is_sampled = [(0, steps[0][0]), *steps], [False, *is_sampled]
    for (start, end), keeps in zip(steps, is_sampled, strict=True):
        if start == 0:
            cache = DynamicCache()
            if recorder:
                recorder.reset()
        dead = sorted(dead_tokens(events, (start, end)))
        query, key = torch.arange(start, end), torch.arange(end)
        visible = key <= query.unsqueeze(1)
        visible[:, dead] = False
        output = model(
            input_ids=torch.tensor([tokens[start:end]]),
            position_ids=query.unsqueeze(0),
            attention_mask=torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None],
            past_key_values=cache,
            use_cache=True,
            output_attentions=need is not None,
        )
        if recorder:
            _observe(recorder, output.attentions, start, dead)
        if keeps:
            logits.append(output.logits[0, -1])
    rows = torch.stack(logits)
    return Replay(rows.argmax(-1).tolist(), rows, recorder)


def _observe(recorder: MassRecorder, attentions: Sequence[torch.Tensor], start: int, dead: Sequence[int]) -> None:
    recorder.forget(dead)
    rows = torch.stack(list(attentions)).double().sum((1, 2)).mean(0)  # [queries, tokens]
    for number, row in enumerate(rows.tolist()):
        live = [position for position in range(start + number + 1) if position not in set(dead)]
        recorder.observe(live, [row[position] for position in live])
