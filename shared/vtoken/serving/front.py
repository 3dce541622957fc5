"""Text or tokens in and out of the loop: what every framework's engine offers its users."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.policies import Policy
from vtoken.scheduler import Counters
from vtoken.serving.engine import ServingEngine, StepReport
from vtoken.serving.protocol import ModelRunner, SamplingParams
from vtoken.serving.requests import FinishReason, Progress, Request
from vtoken.serving.requests import Output as Ended
from vtoken.trace import VictimTrace
from vtoken.types import cdiv

__all__ = ["Frontend", "MakeSpec", "Output", "Prompts", "Sampling"]

_DEFAULT_MODEL_LEN = 4096
_GREEDY = SamplingParams()

Prompts: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams]
Bar: TypeAlias = Callable[[bool], AbstractContextManager[Callable[[Progress], None]]]
"""(is it wanted) -> a progress bar that is told how far a run is."""


class MakeSpec(Protocol):
    """A pool of this size for the model."""

    def __call__(self, *, block_size: int, num_blocks: int, max_num_reqs: int) -> KVSpec: ...


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt.

    Attributes:
        index: of the prompt among those given.
        prompt_token_ids, token_ids: prompt, and output with its stop token.
        text: the output decoded; empty without a tokenizer.
        finish_reason: see ``vtoken.serving.requests.FinishReason``.
        num_evicted: tokens of prompt and output that were dead at its end.
        num_preemptions: how often its KV was dropped and rebuilt.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_evicted: int
    num_preemptions: int


class Frontend:
    """Continuous batching of one model under one configuration.

    Attributes:
        runner: the model.
        loop: the engine beneath, for one step at a time.
        tokenizer: of text prompts, or None.
        trace: victims chosen so far.
    """

    def __init__(
        self,
        runner: ModelRunner,
        make_spec: MakeSpec,
        max_positions: int,
        bar: Bar,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        *,
        config: VTokenConfig | None = None,
        policy_object: Policy | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        chunk_tokens: int = 512,
        prefix_caching: bool = False,
        trace: VictimTrace | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        **options: Any,
    ) -> None:
        """Allocates the pool. The first six arguments are the framework's, the others its users'.

        Args:
            runner: the model.
            make_spec: a pool for it.
            max_positions: the model's limit.
            bar: draws progress.
            tokenizer: has ``encode`` and ``decode``, as those of transformers and tokenizers.
            vocab_size: token ids of a prompt lie below it.
            config: what dies, and when its memory comes back; None builds it from ``options``.
            policy_object: a policy of your own instead of the registered one that ``config`` names.
            block_size: tokens of a block.
            num_blocks: of the pool, the null block included; None is room for ``max_num_seqs`` requests of
                ``max_model_len`` tokens.
            max_num_seqs: requests that run at once.
            max_model_len: tokens of one request, evicted ones included; None is the model's limit, at most 4096.
            chunk_tokens: prompt tokens of one step, all requests together.
            prefix_caching: whether a request may begin with a running one's blocks.
            trace: victims to replay; no policy is asked.
            on_step: takes a report of each pass.
            **options: fields of ``VTokenConfig``, instead of ``config``. Neither: nothing is evicted.

        Raises:
            SpecError: an argument is not as it should be.
        """
        if config is not None and options:
            raise SpecError(f"config and {', '.join(options)} are both given: put them into config")
        if num_blocks is None and max_num_seqs < 1:
            raise SpecError(f"max_num_seqs={max_num_seqs}: give at least 1")
        config = config or VTokenConfig.from_mapping({"policy": "none"} | options)
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = min(max_positions, _DEFAULT_MODEL_LEN) if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= max_positions:
            raise SpecError(f"max_model_len={max_model_len}: give 1 to the model's {max_positions}")
        if num_blocks is None:
            num_blocks = max_num_seqs * cdiv(self.max_model_len, max(block_size, 1)) + 1
        self.trace = VictimTrace()
        self._bar = bar
        self.loop = ServingEngine(
            runner,
            make_spec(block_size=block_size, num_blocks=num_blocks, max_num_reqs=max_num_seqs),
            config,
            policy=policy_object,
            chunk_tokens=chunk_tokens,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
            share_prefixes=prefix_caching,
            replay=trace,
            on_event=self.trace.add,
            on_step=on_step,
        )

    @property
    def counters(self) -> Counters:
        """What has happened so far: evictions, moves, plans, preemptions."""
        return self.loop.counters

    def generate(self, prompts: Prompts, sampling: Sampling = _GREEDY, *, progress: bool = True) -> list[Output]:
        """Serves all prompts to their ends, in the order given.

        Args:
            prompts: one text, texts, or token ids.
            sampling: for all, or one for each.
            progress: whether a bar is drawn on stderr, if that is a terminal.

        Raises:
            SpecError: a prompt is empty or never fits; nothing was started.
        """
        token_ids = self._token_ids(prompts)
        with self._bar(progress) as advance:
            ended = self.loop.generate(token_ids, sampling, on_progress=advance)
        return [self._output(index, *both) for index, both in enumerate(zip(token_ids, ended, strict=True))]

    def stream(self, prompts: Prompts, sampling: Sampling = _GREEDY) -> Iterator[tuple[int, int]]:
        """Yields ``(index of the prompt, token id)`` as tokens are sampled; closing it aborts what is left."""
        return self.loop.stream(self._token_ids(prompts), sampling)

    def submit(self, prompt: str | Sequence[int], sampling: SamplingParams = _GREEDY) -> Request:
        """Queues one request, which ``step`` serves: its ``output`` grows until it has a ``finish_reason``."""
        return self.loop.submit(self._encode(prompt), sampling)

    def step(self) -> None:
        """One pass over the requests that run."""
        self.loop.step()

    def _token_ids(self, prompts: Prompts) -> list[Sequence[int]]:
        each = [prompts] if isinstance(prompts, str) else prompts
        return [self._encode(prompt) for prompt in each]

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise SpecError("a text prompt needs a tokenizer: give tokenizer=, or token ids")
        encoded = self.tokenizer.encode(prompt)
        ids: Sequence[int] = getattr(encoded, "ids", encoded)
        return ids

    def _output(self, index: int, prompt: Sequence[int], ended: Ended) -> Output:
        ids = ended.token_ids
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True) if self.tokenizer is not None else ""
        return Output(index, tuple(prompt), ids, text, ended.finish_reason, ended.num_evicted, ended.num_preemptions)
