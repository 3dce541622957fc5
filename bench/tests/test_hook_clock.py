"""Clocks on the plugin's hooks, on classes that stand for an engine's, and what is made of their figures."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from vtoken_bench.hook_clock import EngineClock, HookClock
from vtoken_bench.overhead import Load, _hooks_of, clocked_rounds


class Engine:
    """Stands for a class of the engine's."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def outer(self, count: int, *, word: str = "") -> str:
        self.log.append("engine")
        return word * count + self.inner()

    def inner(self) -> str:
        return "engine"

    def untouched(self) -> None:
        pass


class Plugin(Engine):
    """Overrides two methods, and adds one that the engine does not know."""

    __module__ = "hooks"

    def outer(self, count: int, *, word: str = "") -> str:
        return self.helper() + super().outer(count, word=word)

    def inner(self) -> str:
        return "plugin " + super().inner()

    def helper(self) -> str:
        self.log.append("plugin")
        return "<"


def test_clocks_sit_on_overrides_alone_and_change_nothing() -> None:
    clock, plain, plugin = HookClock(), Engine([]), Plugin([])
    untouched = Engine.untouched
    with clock.attached([plain, plugin], "hook"):
        assert plugin.outer(2, word="a") == "<aaplugin engine"
    assert not clock.calls  # no class of that package
    classes = (vars(Engine).copy(), vars(Plugin).copy())
    with clock.attached([plain, plugin], "hooks"):
        assert Engine.untouched is untouched
        assert (plugin.outer(2, word="a"), plain.outer(1)) == ("<aaplugin engine", "engine")
    assert clock.calls == {"Plugin.outer": 1, "Plugin.inner": 1}
    assert clock.returns.total() == 2
    assert not clock.answered  # both went on to the engine's
    assert (vars(Engine).copy(), vars(Plugin).copy()) == classes
    assert plugin.log == ["plugin", "engine"] * 2


def test_a_hook_is_timed_without_what_the_engine_does_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a tick; a hook sees the ticks between its own looks."""
    ticks = iter(range(0, 10**9, 1000))
    clock = HookClock()
    monkeypatch.setattr("vtoken_bench.hook_clock.perf_counter_ns", lambda: next(ticks))
    plugin = type(
        "Hooked", (_Base,), {"outer": _Base.hooked_outer, "inner": _Base.hooked_inner, "__module__": "hooks"}
    )()
    with clock.attached([plugin], "hooks"):
        plugin.outer()
    assert clock.calls == {"Hooked.outer": 1, "Hooked.inner": 1}
    assert clock.returns == {"Hooked.outer": 1, "Hooked.inner": 1}
    assert clock.ns == {"Hooked.outer": 2000, "Hooked.inner": 2000}  # before and behind the engine's part, each


class _Base:
    def outer(self) -> None:
        self.inner()

    def inner(self) -> None:
        pass

    def hooked_outer(self) -> None:
        _Base.outer(self)

    def hooked_inner(self) -> None:
        _Base.inner(self)


def test_the_clocks_own_time_is_taken_off() -> None:
    clock = HookClock()
    plugin = Plugin([])
    with clock.attached([plugin], "hooks"):
        for _ in range(50):
            plugin.inner()
    assert clock.calls == {"Plugin.inner": 50}
    assert clock.us["Plugin.inner"] < clock.ns.total() / 1000
    clock.clear()
    assert not clock.us
    assert not clock.returns


class Deep(Plugin):
    """Overrides a hook of its own package, and answers odd calls by itself."""

    __module__ = "hooks"

    def outer(self, count: int, *, word: str = "") -> str:
        return "odd" if count % 2 else super().outer(count, word=word)


def test_answered_are_the_calls_that_did_not_go_on_to_what_the_hook_overrides() -> None:
    clock, plugin = HookClock(), Deep([])
    with clock.attached([plugin], "hooks"):
        for count in range(5):
            plugin.outer(count)
    assert clock.calls == {"Deep.outer": 5, "Plugin.outer": 3, "Plugin.inner": 3}
    assert clock.answered == {"Deep.outer": 2}
    clock.clear()
    assert not clock.answered


def test_the_engines_own_method_is_timed_in_an_engine_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a tick. A call with another one within has no figure."""
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("vtoken_bench.hook_clock.perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr("vtoken_bench.hook_clock._cost", lambda shape: SimpleNamespace(hook_ns=100 * shape[0]))
    clock, plain, deep = EngineClock(), Engine([]), Deep([])
    inner = Engine.inner
    with clock.attached([deep], "hooks"):
        assert plain.outer(1) == "engine"
        assert plain.inner() == "engine"
    assert clock.ns == {"Plugin.inner": 900}
    assert Engine.inner is inner
    assert plain.log == ["engine"]


def test_the_slowest_tenth_of_the_engines_calls_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("vtoken_bench.hook_clock.perf_counter_ns", lambda: now[0])
    monkeypatch.setattr("vtoken_bench.hook_clock._cost", lambda shape: SimpleNamespace(hook_ns=0))
    clock = EngineClock()

    def lasts(nanoseconds: int) -> None:
        now[0] += nanoseconds

    timed = clock.on_method(["Plugin.inner"], lasts)
    for nanoseconds in (10_000, *[400] * 9, *[600] * 9, 90_000):
        timed(nanoseconds)
    assert clock.ns == {"Plugin.inner": 500}


class Decoder:
    """Stands for an engine that decodes: its plugin answers three calls of four."""

    case = SimpleNamespace(name="none", evicts=False)
    counts: ClassVar[dict[str, int]] = {"evicted": 0, "recycled": 0}

    def __init__(self) -> None:
        self.plugin = Deep([])
        self.hooked = [self.plugin]

    def step(self) -> None:
        for count in (0, 1, 3, 5):
            self.plugin.outer(count)


def test_what_is_added_is_the_hooks_time_less_the_work_that_they_replace() -> None:
    load = Load(num_requests=1, prompt_len=1, kv_budget=1, interval=1, num_steps=10, num_rounds=3)
    own = {"Deep.outer": 2000.0, "Plugin.outer": 10.0**9}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vtoken_bench.overhead._PLUGIN", "hooks")
        clocked = clocked_rounds(Decoder(), load, own)  # type: ignore[arg-type]
    hook = clocked.hooks["Deep.outer"]
    assert (hook.calls, hook.answered) == (4, 3)
    assert (clocked.hooks["Plugin.outer"].calls, clocked.hooks["Plugin.outer"].answered) == (1, 0)
    assert clocked.hooks["Plugin.outer"].replaced_us == 0
    assert len(clocked.added_us) == 3
    for gross, replaced, added in zip(clocked.gross_us, clocked.replaced_us, clocked.added_us, strict=True):
        assert added == pytest.approx(gross - replaced)
        assert replaced > 0
    assert hook.replaced_us == pytest.approx(sum(clocked.replaced_us) / 3)
    assert sum(each.gross_us for each in clocked.hooks.values()) == pytest.approx(sum(clocked.gross_us) / 3)
    assert clocked.percent[0] == pytest.approx(100 * clocked.added_us[0] / clocked.step_us[0])
    assert clocked.gross_percent[0] == pytest.approx(100 * clocked.gross_us[0] / clocked.step_us[0])


def test_replaced_are_the_answered_calls_at_the_price_of_the_engines_own_method() -> None:
    clock = HookClock()
    plugin = Deep([])
    with clock.attached([plugin], "hooks"):
        for count in (0, 1, 3, 5):
            plugin.outer(count)
    hooks = _hooks_of(clock, {"Deep.outer": 2000.0, "Plugin.outer": 10.0**9}, num_steps=2, cpu_share=0.5)
    assert {name: hook.replaced_us for name, hook in hooks.items() if hook.replaced_us} == {"Deep.outer": 3 * 2 / 4}
    assert sum(hook.gross_us for hook in hooks.values()) == pytest.approx(sum(clock.us.values()) / 4)
