"""What the engine must have computed: transformers in float32, true positions, one explicit mask for each request.

Knows of no table, slot or block: only which position was invisible from which computed count on.
"""

from dataclasses import dataclass, field

import torch

TIE = 2e-6
"""Logprobs less far apart are one: some units in the last place of float32, and sums come in another order here."""


@dataclass
class Epoch:
    """From a request's (re)start to its preemption or end. ``deaths``: (computed count, position)."""

    deaths: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0  # computed count at its preemption


class Reference:
    def __init__(self, model_dir: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], deaths: list[tuple[int, int]]) -> torch.Tensor:
        """``[len(tokens), vocab]``: the KV of every position is computed in the step that wrote it, under its mask."""
        size = len(tokens)
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        for count, position in deaths:
            visible[count:, position : position + 1] = False  # the last token may die unseen, its own step thrown away
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(size)[None],
            attention_mask=mask,
            use_cache=False,
        ).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def expected(self, tokens: list[int], prompt_len: int, epochs: list[Epoch]) -> list[tuple[int, float]]:
        """For each generated token of ``tokens``: what greedy sampling gives there, and the logprob of the token.

        Where the best two are a tie, that of ``tokens`` is taken to be the greedy one.

        A token is sampled in the first epoch that computes the position before it.
        """
        result: list[tuple[int, float]] = []
        for number, epoch in enumerate(epochs):
            end = len(tokens) - 1 if number == len(epochs) - 1 else min(epoch.end, len(tokens) - 1)
            first = prompt_len + len(result)
            if end < first:
                continue
            table = self.logprobs(tokens[:end], epoch.deaths)
            for index in range(first, end + 1):
                row, token = table[index - 1], tokens[index]
                greedy = token if row.max() - row[token] < TIE else int(row.argmax())
                result.append((greedy, float(row[token])))
        return result
