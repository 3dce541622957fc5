import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from vtoken.cli import main
from vtoken_bench.hook_clock import EngineClock, HookClock
from vtoken_bench.overhead import Load, _hooks_of, clocked_rounds
from vtoken_bench.suites import overhead, suites

REQUESTS, STEPS, ROUNDS = 4, 4, 2
ANSWERED = {
    "EvictingManager.get_num_blocks_to_allocate",
    "EvictingManager.allocate_new_blocks",
    "EvictingManager.cache_blocks",
    "VTokenScheduler._reserve_prefill_lookahead",
}


def _bench(*arguments: str) -> int:
    try:
        return main(["bench", "overhead", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


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


def test_the_suite_is_found() -> None:
    assert suites()["overhead"] is overhead.command


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--steps", "0"), "'0' is no whole number"), (("--model", "/nowhere"), "no such model")]
)
def test_bad_usage_is_two(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str) -> None:
    pytest.importorskip("vllm")
    assert _bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("percent", "added", "code"), [(0.9, 140.0, 0), (1.1, 140.0, 1), (0.9, 160.0, 1)])
def test_the_worst_judged_case_is_judged(percent: float, added: float, code: int) -> None:
    def clocked(name: str, is_judged: bool, figure: float, share: float) -> Any:
        case = SimpleNamespace(name=name, is_judged=is_judged)
        gross = {"gross_us": [figure + 20], "gross_percent": [share + 2]}
        return SimpleNamespace(case=case, added_us=[figure], **gross, percent=[share], step_us=[1.0])

    spread = SimpleNamespace(median=1.0, low=0.9, high=1.1)
    cases = [clocked("none", True, 10, 0.1), clocked("always", True, added, percent), clocked("mass", False, 999, 9)]
    ratios = dict.fromkeys(("stock again", "none", "pressure"), spread)
    summary = overhead._summary(cases, ratios)  # type: ignore[arg-type]
    assert (summary["overhead_percent"], summary["added_us_per_step"]) == (percent, added)
    assert (summary["gross_us_per_step"], summary["gross_percent"]) == (added + 20, percent + 2)
    assert summary["within"] == (not code)
    assert (summary["aa_ratio"], summary["ab_spread"]) == (1.0, [0.9, 1.1])


@pytest.fixture(scope="module")
def record(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm")
    path = tmp_path_factory.mktemp("overhead") / "overhead.json"
    flags = {"requests": REQUESTS, "prompt": 40, "interval": 8, "steps": STEPS, "repeats": ROUNDS}
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    code = _bench("--model", str(vllm_folder), "--json", str(path), *arguments)
    assert code in (0, 1)  # clocks are not judged here
    loaded: dict[str, Any] = json.loads(path.read_text())
    assert loaded["summary"]["within"] == (code == 0)
    return loaded


@pytest.mark.filterwarnings("ignore")
def test_the_record_has_every_case_its_bound_and_the_control(record: dict[str, Any]) -> None:
    rows = {(row["name"], row["params"]["case"]): row for row in record["rows"]}
    assert record["schema"] == "vtoken/bench-overhead/1"
    assert {case for name, case in rows if name == "added_us"} >= {"none", "pressure", "always", "verify"}
    assert {case for name, case in rows if name == "step_over_stock"} == {"stock again", "none", "pressure"}
    for case in ("none", "pressure", "always"):
        assert rows["added_us", case]["bound"] == 150
        assert rows["overhead_percent", case]["bound"] == 1
        assert rows["step_us", case]["value"] > rows["gross_us", case]["value"] > 0
        assert rows["replaced_us", case]["value"] > 0
        assert rows["gross_us", case]["bound"] is rows["replaced_us", case]["bound"] is None
        assert rows["gross_percent", case]["value"] > rows["overhead_percent", case]["value"]
    assert rows["added_us", "verify"]["bound"] is rows["overhead_percent", "verify"]["bound"] is None
    summary = record["summary"]
    assert summary["gross_percent"] == max(
        rows["gross_percent", case]["value"] for case in ("none", "pressure", "always")
    )
    assert summary["added_us_per_step"] == max(
        rows["added_us", case]["value"] for case in ("none", "pressure", "always")
    )
    assert summary["aa_ratio"] == rows["step_over_stock", "stock again"]["value"]
    assert summary["ab_ratio"] == rows["step_over_stock", "none"]["value"]
    is_measured = ("added_us", "mass") in rows
    assert is_measured == (summary["mass"] == "measured")
    assert not is_measured or rows["added_us", "mass"]["bound"] is None


@pytest.mark.filterwarnings("ignore")
def test_clocks_see_every_hook_of_every_step_and_the_state_that_the_case_is_about(record: dict[str, Any]) -> None:
    num_steps = STEPS * ROUNDS
    for name, case in record["cases"].items():
        calls = {hook: figures["calls"] for hook, figures in case["hooks"].items()}
        assert case["steps"] == num_steps
        answered = {hook for hook, figures in case["hooks"].items() if figures["answered"]}
        assert answered == ANSWERED
        replaced = {hook for hook, figures in case["hooks"].items() if figures["replaced_us"]}
        assert replaced <= answered
        once = ("VTokenScheduler.schedule", "VTokenScheduler.update_from_output", "EvictingRunnerV1._update_states")
        assert [calls[hook] for hook in once] == [1, 1, 1]
        is_overridden = any(hook.endswith("._prepare_inputs") for hook in calls)
        assert is_overridden == (case["tokens"]["evicted"] > 0)  # with no dead token vLLM's own runs bare
        for hook in ("get_num_blocks_to_allocate", "allocate_new_blocks", "cache_blocks"):
            assert calls[f"EvictingManager.{hook}"] == REQUESTS
        if name in ("none", "pressure"):
            assert case["tokens"] == {"evicted": 0, "recycled": 0}
    assert record["cases"]["always"]["tokens"] == {"evicted": REQUESTS * num_steps, "recycled": REQUESTS * num_steps}
