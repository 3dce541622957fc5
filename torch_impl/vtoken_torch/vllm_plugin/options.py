"""What a user may set: for the engine (``additional_config``) and for one request (``extra_args``, ``vllm_xargs``).

Imports neither vLLM nor torch: every process may read it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import Policy, get_policy

__all__ = ["NAMESPACE", "PluginOptions", "request_config", "usable_policy"]

NAMESPACE = "vtoken"

# key -> (the values that this version can serve, what to do about any other)
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "copy_stream": (("compute",), "copies run on the compute stream; leave it out or give 'compute'"),
    "verify": ((False,), "online verification is not there yet; leave it out or give false"),
    "timeline": ((None,), "the timeline is not there yet; leave it out"),
    "mode": (("eager",), "vLLM's kernels read packed layouts alone; leave it out or give 'eager'"),
    "regime": (("ordered",), "copies run on the compute stream; leave it out or give 'ordered'"),
}
_PATHS = ("record_trace", "replay_trace")

_OF_A_REQUEST = (
    "policy",
    "kv_budget",
    "eviction_ratio",
    "interval",
    "num_sinks",
    "recent",
    "protected",
    "seed",
    "page_size",
)
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
_SWITCHES = ("off", "protect_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """The engine's settings.

    Attributes:
        config: what dies and when, for every request that does not say otherwise.
        record_trace: victim trace to write (JSONL, ``vtoken.trace``).
        replay_trace: victim trace whose deaths replace the policy's choice.
    """

    config: VTokenConfig
    record_trace: Path | None = None
    replay_trace: Path | None = None

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
        paths = {key: _path(key, options.pop(key)) for key in _PATHS if options.get(key) is not None}
        own = {key: value for key, value in options.items() if key not in ("copy_stream", "verify", "timeline")}
        config = VTokenConfig.from_mapping(own)
        usable_policy(config.policy)
        return cls(config=config, **paths)


def request_config(extra_args: Mapping[str, Any] | None, default: VTokenConfig) -> VTokenConfig:
    """The configuration of one request: the engine's with the request's changes.

    Nested under ``extra_args["vtoken"]`` by the names of ``VTokenConfig``, or flat by the ``vtoken_*`` names that
    ``vllm_xargs`` can carry; not both. Raises SpecError that names field, value and remedy.
    """
    nested, flat = _given(extra_args or {})
    if not nested and not flat:
        return default
    names = {field: key for key, field in _FLAT.items() if key in flat}
    changes = {field: flat[key] for field, key in names.items()} if flat else dict(nested)
    switches = {key: _switch(names.get(key, key), changes.pop(key, False)) for key in _SWITCHES}
    if "vtoken_protect" in flat:
        changes["protected"] = _pairs(changes["protected"])
    if switches["protect_prompt"]:
        if "protected" in changes:
            raise SpecError(
                f"{names.get('protect_prompt', 'protect_prompt')}: ranges are protected too, give one of both"
            )
        changes["protected"] = "prompt"
    try:
        config = default.with_changes(**_with_one_budget(changes))
        usable_policy(config.policy)
    except SpecError as error:
        raise SpecError(_renamed(str(error), names)) from None
    return _turned_off(config) if switches["off"] else config


@cache  # looking an entry point up takes 20 ms, and requests name policies
def usable_policy(name: str) -> Policy:
    """The policy of that name, or SpecError if it needs what the engine does not collect yet."""
    policy = get_policy(name)
    if policy.signals:
        needs = ", ".join(sorted(signal.value for signal in policy.signals))
        raise SpecError(
            f"policy={name!r} needs {needs}, which the vLLM plugin does not collect yet: "
            "use 'streaming_llm', 'sliding_window', 'random' or 'none'"
        )
    return policy


def _given(extra_args: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    nested = extra_args.get(NAMESPACE, {})
    flat = {key: value for key, value in extra_args.items() if key.startswith(f"{NAMESPACE}_")}
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
        if key in VTokenConfig.__dataclass_fields__:
            raise SpecError(f"{key}={given[key]!r}: it holds for the whole engine, set it in additional_config")
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise SpecError(f"{key}={given[key]!r}: unknown option, {hint}")


def _switch(key: str, value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int | float):  # JSON's true arrives as 1 through vllm_xargs
        raise SpecError(f"{key}={value!r}: give true or false")
    return bool(value)


def _pairs(flat: object) -> list[tuple[Any, Any]]:
    if not isinstance(flat, list | tuple) or len(flat) % 2:
        raise SpecError(f"vtoken_protect={flat!r}: give [a0, b0, a1, b1, ...], the half-open ranges one after another")
    return list(zip(flat[::2], flat[1::2], strict=True))


def _with_one_budget(changes: dict[str, Any]) -> dict[str, Any]:
    """A budget of one kind replaces the engine's of the other kind."""
    if "kv_budget" in changes:
        return {"eviction_ratio": None, **changes}
    return {"kv_budget": None, **changes} if "eviction_ratio" in changes else changes


def _turned_off(config: VTokenConfig) -> VTokenConfig:
    return config.with_changes(policy="none", kv_budget=None, eviction_ratio=None)


def _renamed(message: str, names: Mapping[str, str]) -> str:
    for field, key in names.items():
        if message.startswith(f"{field}="):
            return key + message[len(field) :]
    return message


def _path(key: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise SpecError(f"{key}={value!r}: give the path of a file")
    return Path(value)
