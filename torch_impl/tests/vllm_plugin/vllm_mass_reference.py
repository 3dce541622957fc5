"""What the policies must have seen and chosen: transformers' own attention weights under the engine's deaths.

Knows of no slot, layout or message: only which position was invisible from which computed count on, and of which
queries the engine's results were back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import torch
from vllm_reference import TIE, Reference

from vtoken.config import VTokenConfig
from vtoken.policies import RankedPolicy, RequestView, lowest, smoothed
from vtoken.policies.ranking import times_above_mean
from vtoken_torch.vllm_plugin.mass.orders import Masses, Question
from vtoken_torch.vllm_plugin.options import usable_policy  # looked up once; get_policy takes 20 ms each time


@dataclass
class Ask:
    """A question to the workers and their answer.

    Attributes:
        positions: the candidates, by the scheduler's table; ``found``, by the workers.
        queries: whose mass is known; the last ``known`` is the count with them.
        victims: lowest first; None: the answer is the masses.
    """

    key: int
    epoch: int
    known: int
    config: VTokenConfig
    question: Question
    positions: list[int]
    found: Masses
    victims: list[int] | None
    queries: list[int]

    def __str__(self) -> str:
        return f"request {self.key}, {self.config.policy}, asked at {self.known}"


@dataclass
class Choice:
    """One time that a policy was asked."""

    key: int
    epoch: int
    first: int  # queries whose mass may be known: [first, known)
    known: int
    num_computed: int
    prompt_len: int
    config: VTokenConfig
    positions: list[int]
    scored: list[int]  # the candidates when the workers were asked
    victims: list[int]
    queries: list[int]  # whose mass is known
    is_cut: bool = False  # a chunk was under way, and left out

    def __str__(self) -> str:
        return f"request {self.key}, {self.config.policy} at {self.num_computed}"


def check_answer(ask: Ask, rows: torch.Tensor) -> None:
    """``rows``: of ``mass_rows``."""
    mass, by_query = _seen(rows, ask, ask.positions)
    assert ask.found.positions.tolist() == ask.positions, f"{ask}: other candidates"
    _assert_close(ask.found.mass, mass, f"{ask}: mass")
    assert len(ask.found.rows) == len(by_query), str(ask)
    for got, wanted in zip(ask.found.rows, by_query, strict=True):
        _assert_close(got, wanted, f"{ask}: a row of the window")
    choice = ask.question.choice
    assert (choice is None) == (ask.victims is None), str(ask)
    if choice is None:
        return
    view = RequestView(ask.known, 1, ask.positions, ask.config, mass, by_query)
    scores = smoothed(view, times_above_mean(view) if choice.score == "above_mean" else mass, choice.smooth)
    may_die = {
        position: score
        for score, position in zip(scores, ask.positions, strict=True)
        if score == score and any(low <= position < high for low, high in choice.spans)
    }
    wanted = sorted(may_die, key=lambda position: (may_die[position], position))[: choice.count]
    assert_same_but_for_ties(ask.victims, wanted, may_die, str(ask))


def check_victims(choice: Choice, rows: torch.Tensor) -> None:
    """The policy chooses the same victims by the reference's masses, ``rows`` of ``mass_rows``.

    Those are scored among whom the workers were asked about, which in step are the candidates.
    """
    policy = usable_policy(choice.config.policy)
    where = choice.num_computed, choice.prompt_len
    view = RequestView(*where, choice.positions, choice.config, *_seen(rows, choice, choice.positions))
    ranking = policy.ranking(view) if isinstance(policy, RankedPolicy) else None
    if ranking is None:
        assert choice.victims == list(policy.select_victims(view)), f"{choice}: other victims"
        return
    asked = RequestView(*where, choice.scored, choice.config, *_seen(rows, choice, choice.scored))
    scores = smoothed(asked, times_above_mean(asked) if ranking.score == "above_mean" else asked.mass, ranking.smooth)
    score_of = dict(zip(choice.scored, scores, strict=True))
    wanted = lowest(view, [score_of.get(position, nan) for position in choice.positions], ranking.recent)
    assert choice.victims == sorted(choice.victims), f"{choice}: not ascending"
    assert_same_but_for_ties(choice.victims, wanted, score_of, f"{choice}: other victims")


def assert_same_but_for_ties(
    victims: Sequence[int], wanted: Sequence[int], score_of: Mapping[int, float], name: str
) -> None:
    """As many victims; where they differ, by scores that the errors allowed in masses cannot tell apart."""
    mine, theirs = set(victims) - set(wanted), set(wanted) - set(victims)
    assert len(victims) == len(set(victims)) == len(wanted), f"{name}: {len(victims)} instead of {len(wanted)}"
    if mine:
        worst, best = max(score_of[each] for each in mine), min(score_of[each] for each in theirs)
        highest = max(score for score in score_of.values() if score == score)
        assert worst - best < TIE * highest, f"{name}: {sorted(mine)} instead of {sorted(theirs)}"


@torch.inference_mode()
def mass_rows(reference: Reference, tokens: list[int], deaths: list[tuple[int, int]]) -> torch.Tensor:
    """``[query, key]``: attention weights, summed over heads, mean over layers."""
    size = len(tokens)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    for count, position in deaths:
        visible[count:, position : position + 1] = False
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    result = reference.model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.arange(size)[None],
        attention_mask=mask,
        use_cache=False,
        output_attentions=True,
    )
    return torch.stack([weights[0].sum(0) for weights in result.attentions]).mean(0)


def _seen(rows: torch.Tensor, choice: Ask | Choice, of_positions: list[int]) -> tuple[list[float], list[list[float]]]:
    """``mass`` and ``mass_rows`` of these positions as the policy must have had them."""
    need = usable_policy(choice.config.policy).mass_need(choice.config)
    positions = torch.tensor(of_positions, dtype=torch.int64)
    queries = torch.tensor(choice.queries[-need.window :], dtype=torch.int64)  # 0: all of them
    known = rows[queries[:, None], positions]
    mass = known.double().sum(0).masked_fill(positions >= choice.known, nan)
    by_query = known.masked_fill(positions > queries[:, None], nan).tolist() if need.rows else []
    return mass.tolist(), by_query


def _assert_close(got: Sequence[float], wanted: Sequence[float], name: str) -> None:
    a, b = torch.tensor(got, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    assert torch.equal(a.isnan(), b.isnan()), f"{name}: known for other tokens"
    known = ~b.isnan()
    if not known.any():
        return  # asked before the first result was back, under pressure
    error = float((a - b)[known].abs().max() / b[known].abs().max())
    assert error < 1e-5, f"{name}: differs by {error:.1e}"
