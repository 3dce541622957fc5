"""An oracle for whole runs: one dense forward under an explicit mask."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from vtoken_jax.engine import JaxEngine


@dataclass
class Life:
    """One request from its admission to a preemption or its end."""

    index: int
    rebuild_to: int
    steps: list = field(default_factory=list)  # (start, end) of each forward
    samples: list = field(default_factory=list)  # (position, index of the output token that follows)


class Oracle:
    """Follows an engine's steps and works out, from the victim trace alone, what every query could see.

    ``check`` then computes each life in one dense forward, and compares the tokens that were sampled in it.
    """

    def __init__(self, engine, prompts):
        self.engine, self.prompts = engine, prompts
        self.lives, self.current = [], {}
        self.reached = dict.fromkeys(range(len(prompts)), 0)
        engine.loop.on_step = self.take

    def take(self, report):
        for index, row in report.rows:
            if row.start == 0:
                self.current[index] = Life(index, self.reached[index])
                self.lives.append(self.current[index])
            life, end = self.current[index], row.start + len(row.token_ids)
            life.steps.append((row.start, end))
            if row.sampling is not None:
                life.samples.append((end - 1, row.num_sampled))
            self.reached[index] = max(self.reached[index], end)

    def hidden(self, life):
        """(query, victim) pairs: a victim is invisible in the step that writes the count at which it dies."""
        deaths, last = {}, life.steps[-1][1]
        for start, end in life.steps:
            for victim in [victim for victim, count in deaths.items() if count < end]:
                yield from ((query, victim) for query in range(start, last))
                del deaths[victim]
            for event in self.engine.trace.events[life.index]:
                if event.at_computed == end or (start < event.at_computed <= end <= life.rebuild_to):
                    deaths |= {v: max(count, end) for v, count in zip(event.chosen, event.died, strict=True)}

    def check(self, model, outputs, tolerance=1e-3):
        """How many tokens were compared: each one's logit is the highest, but for the tolerance."""
        for life in self.lives:
            count, output = life.steps[-1][1], outputs[life.index].token_ids
            hidden = np.zeros((count, count), bool)
            for query, victim in self.hidden(life):
                hidden[query, victim] = True
            logits, _ = model([*self.prompts[life.index], *output][:count], hidden)
            for position, draw in life.samples:
                assert logits[position, output[draw]] > logits[position].max() - tolerance, (life.index, position, draw)
        return sum(len(life.samples) for life in self.lives)


@pytest.fixture
def make_oracle():
    return Oracle


@pytest.fixture
def make_engine(model_folders):
    """A small engine of its own on the tiny Llama; all of them compile the same few steps."""

    def make(**changes):
        options = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 2, "max_model_len": 200, "chunk_tokens": 16}
        return JaxEngine(model_folders("llama"), **options | changes)

    return make


@pytest.fixture
def evicting():
    """Options under which a few dozen tokens do everything."""

    def options(policy, **changes):
        small = {"kv_budget": 16, "interval": 6, "when": "always", "num_sinks": 2, "history": 8, "page_size": 4}
        return {"policy": policy, **small, **changes}

    return options
