import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.cli import main
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
