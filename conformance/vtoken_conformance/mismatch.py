"""A difference between an executor and the model, and the rule of SPEC.md that it breaks."""

from dataclasses import dataclass

from vtoken.types import ReqId

__all__ = ["Call", "Mismatch", "compare_equal"]


class Mismatch(Exception):
    """An executor differs from the model. ``step`` is the number of the call, counted from 1."""

    def __init__(self, rule: str, what: str, expected: object, got: object) -> None:
        super().__init__(f"{rule}: {what}: expected {expected}, got {got}")
        self.rule = rule
        self.what = what
        self.expected = str(expected)
        self.got = str(got)
        self.step = 0


@dataclass(frozen=True, slots=True)
class Call:
    """The call after which things are compared, and the requests that it may change."""

    op: str
    touched: tuple[ReqId, ...] = ()

    @property
    def main_rule(self) -> str:
        """The rule that the call follows."""
        return _BY_OP[self.op][""]

    def rule(self, aspect: str, req_id: ReqId) -> str:
        """The rule that is broken if this aspect of that request differs after the call."""
        if req_id not in self.touched:
            return _UNTOUCHED[aspect]
        return _BY_OP[self.op].get(aspect, self.main_rule)


_UNTOUCHED = {"blocks": "INV-2", "live": "Q-3", "place": "INV-2", "bytes": "INV-7", "count": "Q-3", "version": "T-6"}

# The rule that a call follows, by aspect where several rules share it.
_BY_OP: dict[str, dict[str, str]] = {
    "admit": {"": "Q-1"},
    "append": {"": "T-2", "bytes": "INV-1"},
    "doom": {"": "T-1"},
    "kill": {"": "T-3"},
    "recycle": {"": "C-1"},
    "launch": {"": "R-1", "blocks": "R-3", "live": "INV-1", "bytes": "R-2", "place": "R-2"},
    "advance": {"": "R-7"},
    "reap": {"": "R-7"},
    "fork": {"": "Q-2"},
    "preempt": {"": "Q-4"},
    "finish": {"": "Q-1"},
    "attend": {"": "A-1"},
    "fingerprint": {"": "H-2"},
    "verify": {"": "INV-1"},
    "refused": {"": "T-8"},
}


def compare_equal(rule: str, what: str, expected: object, got: object) -> None:
    """One value against the other."""
    if expected != got:
        raise Mismatch(rule, what, expected, got)
