"""Verification mode on an engine that is broken on purpose: it names what broke, and only those that it hit fail."""

import logging
import re

import pytest
from vllm_breaks import BREAKS, Saboteur

SETTINGS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 6, "when": "always", "verify": True}


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "asynchronous"])
def engine(request, tiny_llama):
    """One engine for all breaks: each must leave it sound."""
    from vllm_world import World

    with World(tiny_llama, SETTINGS, enable_prefix_caching=True, async_scheduling=request.param) as world:
        world.watch.check_pass = lambda output: None  # it would stop at the breaks itself
        yield world


def run(engine, first_key):
    """Serves all requests; their last outputs."""
    ends, step = {}, engine.engine.step

    def watched_step():
        outputs = step()
        ends.update({int(output.request_id) - first_key: output.outputs[0] for output in outputs if output.finished})
        return outputs

    engine.engine.step = watched_step
    try:
        engine.run()
    finally:
        engine.engine.step = step
    return ends


_LOGGED = re.compile(r"vToken: step (\d+), requests (\[.*?\]), slots \[(.*?)\]: INV-(\d): ")


@pytest.mark.parametrize(
    ("break_it", "numbers", "failing", "num_aside"), BREAKS, ids=[break_it.__name__ for break_it, *_ in BREAKS]
)
def test_a_break_is_named_and_fails_what_it_hit(
    engine, reference, tokens, monkeypatch, caplog, break_it, numbers, failing, num_aside
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.ERROR, "vllm.vtoken")
    checks = engine.scheduler.parts[0]
    assert type(checks).__name__ == "OnlineChecks"
    checks.findings.clear()
    num_aside += len(checks.books.aside)
    saboteur = Saboteur(engine, monkeypatch)
    break_it(saboteur)
    keys = [engine.submit(tokens(length), 60) - saboteur.first_key for length in (90, 100, 110)]
    ends = run(engine, saboteur.first_key)
    assert saboteur.is_done, "the break never happened"
    failed = [key for key in keys if ends[key].finish_reason == "error"]
    assert {finding.number for finding in checks.findings} == numbers
    assert failed == failing if isinstance(failing, list) else len(failed) == failing
    assert all(ends[key].stop_reason.startswith("INV-") for key in failed)
    sound = [key for key in keys if key not in failed]
    assert all(ends[key].finish_reason == "length" for key in sound)
    engine.assert_exact(reference, {saboteur.first_key + key for key in sound})
    messages = [record.getMessage() for record in caplog.records if record.name == "vllm.vtoken"]
    found = [_LOGGED.match(text) for text in messages]
    logged = [match for match in found if match]
    assert {text.split()[1] for text in messages if " ends with an error: INV-" in text} == {
        req_id for match in logged for req_id in re.findall(r"'([^']+)'", match[2])
    }
    assert {int(match[4]) for match in logged} == numbers
    assert all(match[3] for match in logged if int(match[4]) in (1, 5, 7)), "no slots are named"
    assert all(int(match[1]) > saboteur.first_pass for match in logged)
    assert {key for key in keys for match in logged if f"'{saboteur.first_key + key}-" in match[2]} == set(failed)
    monkeypatch.undo()
    assert len(checks.books.aside) == num_aside
    assert engine.pool.get_num_free_blocks() + num_aside == engine.num_free_at_start
    key = engine.submit(tokens(100), 20)  # whoever comes next is served
    engine.run()
    engine.assert_exact(reference, {key})
