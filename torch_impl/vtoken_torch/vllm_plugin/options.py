"""What a user may set: for the engine (``additional_config``) and for one request (``extra_args``, ``vllm_xargs``).

Imports neither vLLM nor torch: every process may read it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import Policy, Signal, get_policy

__all__ = ["NAMESPACE", "PluginOptions", "request_config", "usable_policy"]

NAMESPACE = "vtoken"

# key -> (the values that this version can serve, what to do about any other)
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "copy_stream": (("compute", "own", "sync"), "give 'compute', 'own' or 'sync'"),
    "signal_source": (("attention", "score_pass"), "give 'attention' or 'score_pass'"),
}
_PATHS = ("record_trace", "replay_trace", "timeline")
_ENGINE_SWITCHES = ("verify", "metrics", "keep_prompt_cache", "unproven_device")

_FLAT = {
    "vtoken_policy": "policy",
    "vtoken_budget": "kv_budget",
    "vtoken_ratio": "eviction_ratio",
    "vtoken_sinks": "num_sinks",
    "vtoken_recent": "recent",
    "vtoken_seed": "seed",
    "vtoken_protect": "protected",
    "vtoken_protect_prompt": "protect_prompt",
    "vtoken_off": "off",
}
_BUDGETS = ("kv_budget", "eviction_ratio")
_FLAT_OF = {field: key for key, field in _FLAT.items()}
_SWITCHES = ("off", "protect_prompt")
_OF_A_REQUEST = (*(field for field in _FLAT.values() if field not in _SWITCHES), "interval", "page_size")
_LARGEST = 2**63 - 1  # what vLLM can carry from one process to another


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """The engine's settings.

    Attributes:
        config: what dies and when, for every request that does not say otherwise.
        record_trace: victim trace to write (JSONL, ``vtoken.trace``).
        replay_trace: victim trace whose deaths replace the policy's choice.
        timeline: file that receives what each step did (JSONL; beside it a trace that Perfetto opens).
        verify: check the invariants online; a violation fails the request, never the server.
        metrics: publish counters and gauges beside vLLM's own.
        keep_prompt_cache: leave the prompt's cached blocks in the prefix cache, copy survivors out of them.
        copy_stream: where copies run: ``compute``, ``own``, or ``sync``.
        signal_source: attention mass of every query (``attention``), or of sampled ones (``score_pass``).
        score_every: the score pass takes all prompt tokens, and of a decoding request one in that many.
        unproven_device: start on CUDA, where nothing of the plugin has run yet.
    """

    config: VTokenConfig
    record_trace: Path | None = None
    replay_trace: Path | None = None
    timeline: Path | None = None
    verify: bool = False
    metrics: bool = True
    keep_prompt_cache: bool = False
    copy_stream: str = "compute"
    signal_source: str = "attention"
    score_every: int = 8
    unproven_device: bool = False

    @property
    def mass_every(self) -> int:
        """Of a decoding request's queries, the mass of one in that many is collected."""
        return self.score_every if self.signal_source == "score_pass" else 1

    @property
    def is_lazy(self) -> bool:
        """Whether deaths only mark. The variants that move nothing have no mode."""
        return self.config.mode == "lazy" and self.config.variant == "vtoken"

    def of_engine(self, index: int) -> Self:
        """The settings of one engine of several (data parallelism), which share no file: 0 keeps the names."""
        paths: dict[str, Any] = {key: _numbered(getattr(self, key), index) for key in _PATHS}
        return replace(self, **paths)

    @classmethod
    def required(cls, additional_config: object) -> Self:
        """The same, of an engine that is enabled."""
        options = cls.from_additional_config(additional_config)
        if options is None:
            raise SpecError(f"additional_config={additional_config!r} has no {NAMESPACE!r}: give its settings")
        return options

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self | None:
        """Reads ``additional_config["vtoken"]``; None if there is no such key, which means: not enabled.

        Raises SpecError on an unknown key, a bad value, or a value that this version cannot serve.
        """
        if not isinstance(additional_config, Mapping) or NAMESPACE not in additional_config:
            return None
        given = additional_config[NAMESPACE]
        if not isinstance(given, Mapping):
            raise SpecError(
                f"additional_config['{NAMESPACE}']={given!r}: give a mapping, for example "
                "{'policy': 'streaming_llm', 'kv_budget': 2048}"
            )
        options = dict(given)
        for key, (served, remedy) in _FIXED.items():
            if key in options and options[key] not in served:
                raise SpecError(f"{key}={options[key]!r}: {remedy}")
        own: dict[str, Any] = {"copy_stream": options.pop("copy_stream", "compute")}
        regime = "fenced" if own["copy_stream"] == "own" else "ordered"
        if options.setdefault("regime", regime) != regime:
            raise SpecError(
                f"regime={options['regime']!r}: it is {regime!r} with copy_stream={own['copy_stream']!r}; leave it out"
            )
        own |= _scoring(options)
        own |= _paths(options)
        own |= {key: _switch(key, options.pop(key)) for key in _ENGINE_SWITCHES if key in options}
        config = VTokenConfig.from_mapping(options)
        usable_policy(config.policy)
        made = cls(config=config, **own)
        if made.keep_prompt_cache and (config.variant == "naive" or made.is_lazy):
            who = "mode 'lazy'" if made.is_lazy else "the variant 'naive'"
            raise SpecError(f"keep_prompt_cache=True: {who} copies nothing out; leave it out")
        return made


def request_config(extra_args: Mapping[str, Any] | None, default: VTokenConfig) -> VTokenConfig:
    """The configuration of one request: the engine's with the request's changes.

    Nested under ``extra_args["vtoken"]`` by the names of ``VTokenConfig``, or flat by the ``vtoken_*`` names that
    ``vllm_xargs`` can carry; not both. Raises SpecError that names field, value and remedy.
    """
    nested, flat = _given(extra_args or {})
    if not nested and not flat:
        return default
    _check_sizes(flat or nested)
    budget = flat.get("vtoken_budget")
    if budget is not None and (type(budget) is not int or budget < 2):  # vLLM reads JSON's true as 1
        raise SpecError(f"vtoken_budget={budget!r}: give a whole number of tokens of at least 2")
    names = _FLAT_OF if flat else {}
    changes = {_FLAT[key]: value for key, value in flat.items()} if flat else dict(nested)
    switches = {key: _switch(names.get(key, key), changes.pop(key, False)) for key in _SWITCHES}
    if switches["protect_prompt"]:
        if "protected" in changes:
            shown, ranges = (names.get(field, field) for field in ("protect_prompt", "protected"))
            raise SpecError(f"{shown}=true beside {ranges}={changes['protected']!r}: give one of both")
        changes["protected"] = "prompt"
    elif "vtoken_protect" in flat:
        changes["protected"] = _pairs(changes["protected"])
    try:
        changes = _with_one_budget(changes, default, names)
        config = default.with_changes(**changes)
        usable_policy(config.policy)
    except SpecError as error:
        raise SpecError(_renamed(str(error), names)) from None
    return _turned_off(config) if switches["off"] else config


@cache  # looking an entry point up takes 20 ms, and requests name policies
def usable_policy(name: str) -> Policy:
    """The policy of that name. Raises SpecError if there is none, or if it needs what the engine does not collect."""
    try:
        policy = get_policy(name)
    except SpecError as error:
        raise SpecError(f"policy={name!r}: {error}") from error
    missing = ", ".join(sorted(signal.value for signal in policy.signals if signal is not Signal.ATTENTION_MASS))
    if missing:
        raise SpecError(
            f"policy={name!r} needs {missing}, which the vLLM plugin does not collect: "
            "use a policy that asks for attention_mass ('h2o', 'tova') or for nothing ('streaming_llm', 'random')"
        )
    return policy


def _given(extra_args: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    if not isinstance(extra_args, Mapping):
        raise SpecError(f"extra_args={extra_args!r}: give a mapping, for example {{'vtoken': {{'kv_budget': 256}}}}")
    nested = extra_args.get(NAMESPACE, {})
    flat = {key: value for key, value in extra_args.items() if str(key).startswith(f"{NAMESPACE}_")}
    if not isinstance(nested, Mapping):
        raise SpecError(f"{NAMESPACE}={nested!r}: give a mapping, for example {{'kv_budget': 256}}")
    if nested and flat:
        raise SpecError(f"{NAMESPACE}={dict(nested)!r} beside {', '.join(sorted(flat))}: give one of both forms")
    _check_known(flat, _FLAT)
    _check_known(nested, (*_OF_A_REQUEST, *_SWITCHES))
    return nested, flat


def _check_known(given: Mapping[str, Any], known: Mapping[str, str] | tuple[str, ...]) -> None:
    for key in given:
        if key in known:
            continue
        if not isinstance(key, str):
            raise SpecError(f"{NAMESPACE}={dict(given)!r}: the key {key!r} is no name, use one of {', '.join(known)}")
        name, short = key.removeprefix("vtoken_"), {each.removeprefix("vtoken_"): each for each in known}
        if name in VTokenConfig.__dataclass_fields__ and name not in _OF_A_REQUEST:
            raise SpecError(f"{key}={given[key]!r}: it holds for the whole engine, set it in additional_config")
        close = difflib.get_close_matches(name, short, n=1)
        hint = f"did you mean {short[close[0]]!r}?" if close else f"known: {', '.join(known)}"
        raise SpecError(f"{key}={given[key]!r}: unknown option, {hint}")


def _check_sizes(given: Mapping[str, Any]) -> None:
    def is_too_large(value: object) -> bool:
        if isinstance(value, list | tuple):
            return any(map(is_too_large, value))
        return isinstance(value, int) and not -_LARGEST <= value <= _LARGEST

    for key, value in given.items():
        if is_too_large(value):
            raise SpecError(f"{key}={value!r}: give integers below 2**63")


def _switch(key: str, value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int | float):  # JSON's true arrives as 1 through vllm_xargs
        raise SpecError(f"{key}={value!r}: give true or false")
    return bool(value)


def _pairs(flat: object) -> list[tuple[int, int]]:
    wanted = "give [a0, b0, a1, b1, ...], half-open ranges one after another, each with 0 <= a <= b"
    if not isinstance(flat, list | tuple) or len(flat) % 2 or any(type(end) is not int for end in flat):
        raise SpecError(f"vtoken_protect={flat!r}: {wanted}")
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    if not all(0 <= start <= end for start, end in pairs):
        raise SpecError(f"vtoken_protect={flat!r}: {wanted}")
    return pairs


def _with_one_budget(changes: dict[str, Any], default: VTokenConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """A budget of one kind replaces the engine's of the other kind; a policy must have one."""
    budget, ratio = (names.get(field, field) for field in _BUDGETS)
    given = {field: changes.get(field) for field in _BUDGETS}
    if None not in given.values():
        raise SpecError(f"{budget}={given['kv_budget']!r} beside {ratio}={given['eviction_ratio']!r}: give one of both")
    merged = {**changes, **given} if any(field in changes for field in _BUDGETS) else changes
    policy = changes.get("policy", default.policy)
    if not isinstance(policy, str) or policy in ("", "none"):
        return merged  # nothing to check, or refused by its own name
    usable_policy(policy)  # a misspelt one is named as such
    if all(merged.get(field, getattr(default, field)) is None for field in _BUDGETS):
        raise SpecError(
            f"policy={policy!r}: it has no budget, neither here nor from the engine: give {budget} or {ratio}"
        )
    return merged


def _turned_off(config: VTokenConfig) -> VTokenConfig:
    return config.with_changes(policy="none", kv_budget=None, eviction_ratio=None)


def _renamed(message: str, names: Mapping[str, str]) -> str:
    for field, key in names.items():
        if message.startswith(f"{field}="):
            return key + message[len(field) :]
    return message


def _scoring(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of attention mass out of ``options``."""
    given: dict[str, Any] = {key: options.pop(key) for key in ("signal_source", "score_every") if key in options}
    every = given.get("score_every", 1)
    if type(every) is not int or every < 1:
        raise SpecError(f"score_every={every!r}: give an integer of at least 1")
    if "score_every" in given and given.get("signal_source") != "score_pass":
        raise SpecError(f"score_every={every!r}: only the score pass samples: give signal_source='score_pass' too")
    return given


def _paths(options: dict[str, Any]) -> dict[str, Path]:
    """Takes the files out of ``options``: no two options may name one."""
    found = {key: _path(key, value) for key in _PATHS if (value := options.pop(key, None)) is not None}
    for key, other in combinations(found, 2):
        if found[key].resolve() == found[other].resolve():
            raise SpecError(f"{key}={str(found[key])!r}: it is the file of {other} too: name another")
    return found


def _path(key: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise SpecError(f"{key}={value!r}: give the path of a file")
    return Path(value)


def _numbered(path: Path | None, index: int) -> Path | None:
    return path if path is None or not index else path.with_stem(f"{path.stem}.{index}")
