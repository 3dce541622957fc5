"""Policies decide which tokens die. One file each, found by name in the entry-point group ``vtoken.policies``."""

from vtoken import plugins
from vtoken.errors import SpecError
from vtoken.policies.base import (
    MassNeed,
    Policy,
    RequestView,
    Signal,
    evictable,
    lowest,
    num_victims,
    smoothed,
)
from vtoken.policies.mass import MassRecorder
from vtoken.policies.ranking import Choice, RankedPolicy, Ranking

__all__ = [
    "Choice",
    "MassNeed",
    "MassRecorder",
    "Policy",
    "RankedPolicy",
    "Ranking",
    "RequestView",
    "Signal",
    "evictable",
    "get_policy",
    "lowest",
    "num_victims",
    "smoothed",
]


def get_policy(name: str) -> Policy:
    """The policy registered as ``name``: an instance of the registered class, or the registered object itself.

    Raises:
        SpecError: unknown name (the closest is named), failed import, or not a policy.
    """
    found = plugins.get_plugin(plugins.POLICIES, name)
    try:
        policy: Policy = found() if isinstance(found, type) else found
    except TypeError as error:
        raise SpecError(f"policy {name!r} ({found!r}) cannot be made: {error}; register an object instead") from error
    missing = [part for part in ("name", "signals", "select_victims") if not hasattr(policy, part)]
    if missing:
        raise SpecError(f"policy {name!r} ({found!r}) lacks {', '.join(missing)}: see vtoken.policies.Policy")
    return policy
