"""Both ways in which a step's rows reach the device say the same, and the one for other devices runs here too."""

from types import SimpleNamespace

import numpy as np
import pytest

SETTINGS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always"}

STEPS = {  # tokens of each row, dead tokens of each, slots of those that write over a dead one
    "decode": ([1, 1, 1], [3, 0, 5], {0: 70, 2: 9}),
    "all recycle": ([1, 1, 1], [3, 1, 5], {0: 70, 1: 33, 2: 9}),
    "a chunk": ([1, 4, 1], [3, 2, 5], {2: 9}),
    "fewer rows": ([1, 2], [0, 7], {0: 40}),
    "nobody recycles": ([2, 1], [6, 0], {}),
}


COUNTS = [40, 25, 33]  # computed tokens of each row


def _side(dead, recycled):
    """What rows ask of a ``WorkerSide``: here each recycle is the second of three."""
    from vtoken_torch.vllm_plugin.record import Recycles

    recycles = {row: Recycles(COUNTS[row] - 1, dead[row] - 2, (91, slot, 92)) for row, slot in recycled.items()}
    return SimpleNamespace(num_dead=dead.__getitem__, recycles=recycles, changed=set(range(len(dead))))


def test_arrays_and_tensors_say_the_same(monkeypatch):
    import torch
    from vllm.v1.worker.gpu import buffer_utils

    from vtoken_torch.vllm_plugin.rows import DeviceRows, HostRows, StepRows

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)  # vLLM's own way without pinned memory
    kinds = [HostRows(4, 8), DeviceRows(4, 2)]
    assert isinstance(StepRows.on(torch.device("cpu"), 4, 8, 2), HostRows)
    lengths = [[torch.zeros(4, dtype=torch.int32) for _ in range(2)] for _ in kinds]
    slot_mappings = [torch.zeros(8, dtype=torch.int64) for _ in kinds]
    for counts, dead, recycled in [*STEPS.values(), *STEPS.values()]:
        num_rows, num_tokens = len(counts), sum(counts)
        row_of = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(counts))
        rows, starts = SimpleNamespace(np=row_of.numpy(), gpu=row_of), np.cumsum([0, *counts])
        positions = torch.arange(100, 100 + num_tokens)
        expected = positions - torch.tensor(dead)[row_of]
        slots = torch.arange(8)
        for row, slot in recycled.items():
            slots[starts[row]] = slot
        for kind, pair, slot_mapping in zip(kinds, lengths, slot_mappings, strict=True):
            side = _side(dead, recycled)
            kind.stage(side, list(range(num_rows)), np.array(COUNTS[:num_rows], np.int32), starts, num_tokens)
            assert kind.num_recycled == len(recycled)
            assert not side.changed
            assert kind.dead_on_host.tolist() == kind.dead.tolist() == dead
            assert torch.equal(kind.packed(positions, rows), expected)
            for each in pair:
                each.fill_(50)
            kind.shorten(*pair)
            for each in pair:
                assert each.tolist() == [50 - count for count in dead] + [50] * (4 - num_rows)
            slot_mapping.copy_(torch.arange(8))
            kind.aim(slot_mapping)
            assert torch.equal(slot_mapping, slots)
        assert positions.tolist() == list(range(100, 100 + num_tokens))  # vLLM's stay as they are


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix caching"])
def test_the_way_of_other_devices_is_exact(world, reference, tokens, monkeypatch, caching):
    from vllm_addresses import watched_addresses

    from vtoken_torch.vllm_plugin.rows import DeviceRows, StepRows

    monkeypatch.setattr(StepRows, "on", lambda device, num_reqs, num_tokens, num_steps: DeviceRows(num_reqs, num_steps))
    with world(SETTINGS, enable_prefix_caching=caching) as engine, watched_addresses() as seen:
        assert isinstance(engine.runner.rows, DeviceRows)
        engine.submit(tokens(100), 60)
        engine.submit(tokens(70), 50, vtoken_policy="streaming_llm", vtoken_budget=90)
        engine.run()
        assert engine.counts["recycled"] > 50
        engine.assert_exact(reference)
    assert {name: len(found) for name, found in seen.items()}["seq_lens"] == 1


@pytest.mark.parametrize("kind", ["host", "device"])
def test_recycles_go_on_by_themselves_until_something_else_is_said(monkeypatch, kind):
    from vllm.v1.worker.gpu import buffer_utils

    from vtoken_torch.vllm_plugin.record import Recycles
    from vtoken_torch.vllm_plugin.rows import DeviceRows, HostRows

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    rows = HostRows(4, 8) if kind == "host" else DeviceRows(4, 2)
    side = SimpleNamespace(num_dead={"a": 0, "b": 5}.get, recycles={"a": Recycles(10, 2, (70, 71, 72))}, changed={"a"})

    def step(counts, req_ids=("a", "b")):
        rows.stage(side, list(req_ids), np.array(counts, np.int32), np.arange(len(counts) + 1), len(counts))
        return rows.dead_on_host.tolist(), list(map(int, rows._slots))

    assert step([10, 50]) == ([3, 5], [70])
    assert step([11, 51]) == ([4, 5], [71])
    assert step([11, 51]) == ([4, 5], [71])  # all follows from the count
    assert step([52, 12], ("b", "a")) == ([5, 5], [72])
    assert step([53, 13], ("b", "a")) == ([5, 5], [])  # over: no dead token more
    side.recycles["b"] = Recycles(54, 5, tuple(range(100, 140)))
    side.changed.add("b")
    assert step([54, 14], ("b", "a")) == ([6, 5], [100])
    del side.recycles["a"]
    assert step([55], ("b",)) == ([7], [101])
    assert step([0, 56], ("a", "b")) == ([0, 8], [102])  # another request of that name


@pytest.mark.parametrize("kind", ["host", "device"])
def test_steps_in_which_all_rows_recycle(monkeypatch, kind):
    """The quick way of steps that go on must say what the long way says, and be left where anything differs."""
    import torch
    from vllm.v1.worker.gpu import buffer_utils

    from vtoken_torch.vllm_plugin.record import Recycles
    from vtoken_torch.vllm_plugin.rows import DeviceRows, HostRows

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    rows = HostRows(4, 8) if kind == "host" else DeviceRows(4, 2)
    recycles = {"a": Recycles(10, 2, tuple(range(100, 108))), "b": Recycles(30, 7, tuple(range(200, 206)))}
    side = SimpleNamespace(num_dead={}.get, recycles=recycles, changed={"a", "b"})
    went_on = []

    def step(first, second):
        counts = np.array([first, second], np.int32)
        rows.stage(side, ["a", "b"], counts, np.arange(3), 2)
        went_on.append(rows._rows.goes_on)
        packed = rows.packed(torch.from_numpy(counts.astype(np.int64)), None)
        assert packed.tolist() == [first - rows.dead_on_host[0], second - rows.dead_on_host[1]]
        return rows.dead_on_host.tolist(), list(map(int, rows._slots))

    assert step(10, 30) == ([3, 8], [100, 200])
    assert step(11, 31) == ([4, 9], [101, 201])
    assert step(12, 32) == ([5, 10], [102, 202])
    assert step(12, 32) == ([5, 10], [102, 202])  # a step over again is none that goes on
    assert step(13, 33) == ([6, 11], [103, 203])
    side.recycles["a"] = Recycles(14, 6, (300, 301, 302))
    side.changed.add("a")
    assert step(14, 34) == ([7, 12], [300, 204])
    assert step(15, 35) == ([8, 13], [301, 205])
    assert step(16, 36) == ([9, 13], [302])
    assert went_on == [False, True, True, False, True, False, True, False]
