"""Clocks inside hooks: the time that a plugin's own code takes within an engine, without the engine's work in between.

A hook is a method that a plugin's class overrides. Entering one starts its clock; the engine's own method, called from
it through ``super()``, stops it until it returns; an override that the engine calls in there starts its own. So the
sum over all hooks is what the plugin adds, whatever nests in what. Which methods these are is read off the classes, so
that a new hook is not forgotten. What the plugin calls of the engine beside ``super()`` is work that it causes: it
counts. So does what it spells out instead of calling ``super()``.

There the engine is spared its own method: *replaced* work. ``EngineClock`` times that method in an engine without the
plugin, and the calls in which a hook did not pass on are what may be taken off. A call that reached ``super()`` is
never among them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from time import perf_counter_ns
from typing import Any, NamedTuple
from unittest.mock import patch

__all__ = ["EngineClock", "HookClock"]

_CALIBRATION_CALLS, _CALIBRATION_ROUNDS = 500, 20
_UNUSUAL = 10  # of so many calls the slowest is left out: it did what a hook that answers by itself never replaces

Shape = tuple[int, tuple[str, ...]]
"""Of a call: positional arguments, and the names of the others."""


@dataclass
class HookClock:
    """Nanoseconds and calls by hook, named ``Class.method``; ``returns`` counts the engine's methods in between.

    ``passed`` counts how often a hook called what it overrides, another hook or the engine's own method.
    """

    ns: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    returns: Counter[str] = field(default_factory=Counter)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _running: str | None = None
    _since: int = 0

    def clear(self) -> None:
        """Starts from zero."""
        self.ns.clear()
        self.calls.clear()
        self.passed.clear()
        self.returns.clear()

    @property
    def answered(self) -> Counter[str]:
        """Calls in which a hook did not call what it overrides."""
        return self.calls - self.passed

    @property
    def us(self) -> dict[str, float]:
        """Microseconds in each hook so far, without what the clocks themselves take, nor the call as such.

        The engine would call its own method with the same arguments.
        """
        return_ns = _cost((0, ())).return_ns
        return {
            hook: (self.ns[hook] - _cost(self._shapes[hook]).hook_ns * count - return_ns * self.returns[hook]) / 1000
            for hook, count in self.calls.items()
        }

    @contextmanager
    def attached(self, objects: Iterable[object], package: str) -> Iterator[None]:
        """Puts clocks on the hooks of these objects: methods that their classes in ``package`` override."""
        with ExitStack() as stack:
            hooks = _overrides(objects, package)
            for owner, name in hooks:
                timed = self.on_hook(_label(owner, name), vars(owner)[name])
                stack.enter_context(patch.object(owner, name, timed))
            for owner, name in {(engine, name) for (_, name), engine in hooks.items()}:
                stack.enter_context(patch.object(owner, name, self.on_engine(vars(owner)[name])))
            yield

    def on_hook(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function under a clock of its own."""
        ns, calls, shapes, passed, name = self.ns, self.calls, self._shapes, self.passed, function.__name__

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, now = self._running, perf_counter_ns()
            if outer is not None:
                ns[outer] += now - self._since
                if outer.endswith(f".{name}"):
                    passed[outer] += 1
            self._running, self._since = label, perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                now = perf_counter_ns()
                ns[label] += now - self._since
                calls[label] += 1
                if label not in shapes:
                    shapes[label] = len(args), tuple(kwargs)
                self._running, self._since = outer, perf_counter_ns()

        return timed

    def on_engine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the clock stopped that runs when it is called."""
        ns, passed, name = self.ns, self.passed, function.__name__

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, now = self._running, perf_counter_ns()
            if outer is None:
                return function(*args, **kwargs)
            ns[outer] += now - self._since
            if outer.endswith(f".{name}"):
                passed[outer] += 1
            self._running = None
            try:
                return function(*args, **kwargs)
            finally:
                self.returns[outer] += 1
                self._running, self._since = outer, perf_counter_ns()

        return timed


class EngineClock:
    """Nanoseconds of the engine's own methods that hooks override, a call, by hook."""

    def __init__(self) -> None:
        self._taken: dict[str, list[int]] = {}
        self._shapes: dict[str, Shape] = {}
        self._num_entered = 0

    @property
    def ns(self) -> dict[str, float]:
        """Mean of the calls but for the slowest tenth, without the clock's own time, by hook."""
        found = {}
        for hook, taken in self._taken.items():
            if not taken:
                continue
            usual = sorted(taken)[: len(taken) - len(taken) // _UNUSUAL]
            found[hook] = max(0.0, sum(usual) / len(usual) - _cost(self._shapes[hook]).hook_ns)
        return found

    @contextmanager
    def attached(self, objects: Iterable[object], package: str) -> Iterator[None]:
        """Puts clocks on what the classes of these objects in ``package`` override, to run an engine without it."""
        hooks = defaultdict(list)
        for (owner, name), engine in _overrides(objects, package).items():
            hooks[engine, name].append(_label(owner, name))
        with ExitStack() as stack:
            for (owner, name), labels in hooks.items():
                stack.enter_context(patch.object(owner, name, self.on_method(labels, vars(owner)[name])))
            yield

    def on_method(self, hooks: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function under a clock. A call in which another one was timed has no figure: it would hold its clock."""
        lists = [self._taken.setdefault(hook, []) for hook in hooks]

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._num_entered = number = self._num_entered + 1
            start = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                taken = perf_counter_ns() - start
                if number == self._num_entered:
                    self._shapes.update(dict.fromkeys(hooks, (len(args), tuple(kwargs))))
                    for each in lists:
                        each.append(taken)

        return timed


def _label(owner: type, name: str) -> str:
    return f"{owner.__name__}.{name}"


def _overrides(objects: Iterable[object], package: str) -> dict[tuple[type, str], type]:
    """All hooks of these objects, by class and name: the engine's class whose method each of them overrides."""
    found: dict[tuple[type, str], type] = {}
    for instance in objects:
        line = type(instance).__mro__
        theirs = [owner for owner in line if not _is_in(owner, package)]
        for owner in line:
            if not _is_in(owner, package):
                continue
            for name, function in vars(owner).items():
                overridden = next((base for base in theirs if isfunction(vars(base).get(name))), None)
                if isfunction(function) and overridden is not None and not name.startswith("__"):
                    found[owner, name] = overridden
    return found


def _is_in(owner: type, package: str) -> bool:
    return f"{owner.__module__}.".startswith(f"{package}.")


class _Cost(NamedTuple):
    hook_ns: float
    return_ns: float


@cache
def _cost(shape: Shape) -> _Cost:
    """What a clock sees of itself in a call of this shape, by a hook that does nothing; the least of some rounds."""
    num_args, names = shape
    args, kwargs = [None] * num_args, dict.fromkeys(names)
    parameters = ", ".join([f"_{index}" for index in range(num_args)] + [f"{name}=None" for name in names])
    nothing = eval(f"lambda {parameters}: None")
    rounds = [_cost_once(nothing, args, kwargs) for _ in range(_CALIBRATION_ROUNDS)]
    return _Cost(min(cost.hook_ns for cost in rounds), min(cost.return_ns for cost in rounds))


def _cost_once(nothing: Callable[..., None], args: list[None], kwargs: dict[str, None]) -> _Cost:
    clock = HookClock()

    def calls(function: Callable[..., None]) -> int:
        start = perf_counter_ns()
        for _ in range(_CALIBRATION_CALLS):
            function(*args, **kwargs)
        return perf_counter_ns() - start

    calls(clock.on_hook("hook", nothing))
    bare = calls(nothing)
    clock.on_hook("calls", calls)(clock.on_engine(nothing))
    return _Cost(clock.ns["hook"] / _CALIBRATION_CALLS, max(0, clock.ns["calls"] - bare) / _CALIBRATION_CALLS)
