"""One frozen, checked configuration for policies and reclamation."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from vtoken.errors import SpecError

__all__ = ["Mode", "Regime", "VTokenConfig", "Variant", "When"]

Variant = Literal["native", "naive", "vtoken"]
Mode = Literal["eager", "lazy"]
When = Literal["pressure", "always"]
Regime = Literal["ordered", "fenced"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "variant": ("native", "naive", "vtoken"),
    "mode": ("eager", "lazy"),
    "when": ("pressure", "always"),
    "regime": ("ordered", "fenced"),
}
_AT_LEAST_ONE = ("interval", "page_size", "history", "smooth")
_NOT_NEGATIVE = ("num_sinks", "recent", "seed", "cooldown_steps", "min_source_blocks")
_POLICY_CHOOSES = ("recent", "smooth", "history", "eviction_ratio")  # None has a meaning
_FRACTIONS = (
    "eviction_ratio",
    "decay",
    "theta_fragmentation",
    "source_utilization",
    "low_watermark",
    "headroom",
    "pressure_low",
    "pressure_high",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VTokenConfig:
    """What dies, and when its memory comes back.

    No policy is the default, since quality is the policy's. Exactly one of ``kv_budget`` (tokens kept) and
    ``eviction_ratio`` (keep ``1 - ratio`` of the computed tokens) goes with every policy but ``none``.

    Attributes:
        policy: name in the entry-point group ``vtoken.policies``.
        kv_budget: bound on live - doomed tokens.
        eviction_ratio: share of the computed tokens to drop, in [0, 1).
        interval: tokens between two evictions.
        num_sinks: first tokens that are never candidates (StreamingLLM); 0 is allowed and hurts quality.
        recent: newest tokens that are never candidates; None lets the policy choose.
        protected: half-open position ranges that are never candidates; ``"prompt"`` protects the whole prompt.
        seed: seed of random draws.
        smooth: odd window of positions over which scores are averaged; 1 is off, None lets the policy choose.
        decay: factor on the cumulated mass at each step (h2o); 1 never forgets.
        history: window in queries of scissorhands and snapkv; None lets the policy choose.
        page_size: tokens a page of paged_eviction.
        variant: native evicts nothing, naive frees blocks that are all dead, vtoken moves tokens too.
        mode: eager | lazy reclamation.
        when: evict under pressure, or always by interval.
        recycle: eager mode writes decode tokens over doomed ones; off gives ``fill`` alone.
        regime: ordered | fenced freeing of blocks.
        theta_fragmentation: lazy trigger, F above it (paper: 0.25).
        source_utilization: a block with at most this share of live slots is an evacuation source.
        min_source_blocks: lazy trigger, sources needed at least.
        low_watermark: lazy trigger, share of free blocks at or below which reclamation may start.
        cooldown_steps: lazy rate limit, steps between two attempts of one request.
        headroom: share of the pool kept back from admission for evacuation targets (lazy).
        pressure_low, pressure_high: shares of free blocks between which ``when="pressure"`` works.
    """

    policy: str
    kv_budget: int | None = None
    eviction_ratio: float | None = None
    interval: int = 64
    num_sinks: int = 4
    recent: int | None = None
    protected: tuple[tuple[int, int], ...] | Literal["prompt"] = ()
    seed: int = 0
    smooth: int | None = None
    decay: float = 1.0
    history: int | None = None
    page_size: int = 16
    variant: Variant = "vtoken"
    mode: Mode = "eager"
    when: When = "pressure"
    recycle: bool = True
    regime: Regime = "ordered"
    theta_fragmentation: float = 0.25
    source_utilization: float = 0.5
    min_source_blocks: int = 2
    low_watermark: float = 0.10
    cooldown_steps: int = 8
    headroom: float = 0.05
    pressure_low: float = 0.05
    pressure_high: float = 0.10

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise SpecError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
        self._check_numbers()
        self._check_budget()
        if self.protected != "prompt":
            object.__setattr__(self, "protected", _checked_ranges(self.protected))

    def _check_numbers(self) -> None:
        for keys, low in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
            for key in keys:
                value = getattr(self, key)
                if not (_is_int(value) and value >= low) and not (value is None and key in _POLICY_CHOOSES):
                    raise SpecError(f"{key}={value!r}: give an integer of at least {low}")
        for key in _FRACTIONS:
            value = getattr(self, key)
            if not (_is_number(value) and 0 <= value <= 1) and not (value is None and key in _POLICY_CHOOSES):
                raise SpecError(f"{key}={value!r}: give a share between 0 and 1")
        if self.smooth is not None and self.smooth % 2 == 0:
            raise SpecError(f"smooth={self.smooth}: give an odd window, so that it has a middle (1 is off)")
        if self.pressure_low > self.pressure_high:
            raise SpecError(f"pressure_low={self.pressure_low} exceeds pressure_high={self.pressure_high}: swap them")
        if not isinstance(self.recycle, bool):
            raise SpecError(f"recycle={self.recycle!r}: give true or false")

    def _check_budget(self) -> None:
        if not _is_name(self.policy):
            raise SpecError(
                f"policy={self.policy!r}: name a policy, for example 'streaming_llm' ('none' evicts nothing)"
            )
        given = [key for key in ("kv_budget", "eviction_ratio") if getattr(self, key) is not None]
        if self.policy != "none" and len(given) != 1:
            raise SpecError(
                f"policy {self.policy!r} needs exactly one of kv_budget and eviction_ratio, got {given or 'none'}"
            )
        if self.kv_budget is not None and (not _is_int(self.kv_budget) or self.kv_budget < 1):
            raise SpecError(f"kv_budget={self.kv_budget!r}: give a whole number of tokens of at least 1")
        if self.eviction_ratio == 1:
            raise SpecError("eviction_ratio=1 would drop every token: give a share below 1")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Builds a config from user input (JSON, command line). An unknown key names the closest known one."""
        cls._check_keys(options)
        if "policy" not in options:
            raise SpecError("policy is missing: name one, for example 'streaming_llm' (no policy is the default)")
        return cls(**dict(options))

    def with_changes(self, **changes: Any) -> Self:
        """A checked copy with some fields replaced."""
        self._check_keys(changes)
        return replace(self, **changes)

    @classmethod
    def _check_keys(cls, options: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                raise SpecError(f"unknown option {key!r}: {hint}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal but rarely meant, for a start-up line."""
        found = []
        if self.policy != "none" and self.num_sinks == 0:
            found.append("num_sinks=0: models often stop at once without their first tokens; 4 is usual")
        kept = self.num_sinks + (self.recent or 0)
        if self.kv_budget is not None and self.kv_budget < kept:
            found.append(f"kv_budget={self.kv_budget} cannot be met: num_sinks and recent always keep {kept} tokens")
        return tuple(found)

    def budget_tokens(self, num_computed_tokens: int) -> int:
        """Tokens to keep (live - doomed) when ``num_computed_tokens`` are computed."""
        if self.kv_budget is not None:
            return min(self.kv_budget, num_computed_tokens)
        if self.eviction_ratio is not None:
            return num_computed_tokens - int(num_computed_tokens * self.eviction_ratio)
        return num_computed_tokens

    def kept_tokens(self, num_computed_tokens: int, prompt_len: int) -> int:
        """Tokens that no policy may choose at this count: sinks, protected ranges, and ``recent`` ones if it is set."""
        protected = ((0, prompt_len),) if self.protected == "prompt" else self.protected
        newest = max(0, num_computed_tokens - (self.recent or 0))
        total = end = 0
        for low, high in sorted(((0, self.num_sinks), *protected, (newest, num_computed_tokens))):
            high = min(high, num_computed_tokens)
            total += max(0, high - max(low, end))
            end = max(end, high)
        return total


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_ranges(ranges: Any) -> tuple[tuple[int, int], ...]:
    checked = []
    try:
        pairs = [(start, end) for start, end in ranges]
    except (TypeError, ValueError):
        raise SpecError(f"protected={ranges!r}: give pairs [start, end), or 'prompt'") from None
    for start, end in pairs:
        if not (_is_int(start) and _is_int(end) and 0 <= start <= end):
            raise SpecError(f"protected range ({start!r}, {end!r}): give 0 <= start <= end")
        checked.append((start, end))
    return tuple(checked)
