import json
import random
import shutil
import zlib

import jax
import pytest

from vtoken.errors import SpecError
from vtoken.policies.h2o import H2OPolicy
from vtoken.serving.protocol import SamplingParams
from vtoken.trace import VictimTrace
from vtoken_jax.model.load import load_weights
from vtoken_jax.snapshot import _bit_sum

rng = random.Random(5)
PROMPTS = [[rng.randrange(96) for _ in range(count)] for count in (45, 9, 30)]
SHARING = [PROMPTS[0], [*PROMPTS[0][:13], 4], PROMPTS[2]]
SAMPLING = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=30, temperature=0.7, seed=3),
    SamplingParams(max_tokens=12),
]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """Name to folder: one is written once and copied for each test that breaks it."""
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture
def running(make_engine, evicting):
    """An engine in the middle of two requests, with a third waiting, doomed tokens, and a trace."""

    def make(prompts=PROMPTS, **changes):
        engine = make_engine(**evicting("h2o") | changes)
        for prompt, sampling in zip(prompts, SAMPLING, strict=True):
            engine.submit(prompt, sampling)
        for _ in range(9):
            engine.step()
        return engine

    return make


def fingerprints(engine):
    return {req_id: engine.loop.pool.fingerprint(req_id) for req_id in sorted(engine.loop.pool.tables)}


def rest(engine):
    return [(each.index, each.token_ids, each.num_evicted) for each in engine.resume()], engine.trace.events


def check_that_a_fresh_engine_goes_on_alike(engine, fresh, folder):
    engine.save_snapshot(folder)
    before = fingerprints(engine), engine.counters.num_evicted_tokens
    expected = rest(engine)

    fresh.load_snapshot(folder)

    assert (fingerprints(fresh), fresh.counters.num_evicted_tokens) == before
    assert len(before[0]) == 2
    assert rest(fresh) == expected
    assert [len(tokens) for _, tokens, _ in expected[0]] == [24, 30, 12]
    assert fresh.loop.pool.pool.num_held == 0


def test_a_fresh_engine_goes_on_with_the_same_bytes_tokens_and_victims(running, make_engine, evicting, snapshots):
    engine = running()
    assert any(table.num_doomed_tokens for table in engine.loop.pool.tables.values())
    check_that_a_fresh_engine_goes_on_alike(engine, make_engine(**evicting("h2o")), snapshots / "whole")


def test_holes_and_shared_blocks_are_restored(running, make_engine, evicting, tmp_path):
    changes = {"mode": "lazy", "low_watermark": 0.0, "prefix_caching": True, "protected": ((0, 12),)}
    engine = running(SHARING, **changes)
    first, second = engine.loop.pool.tables.values()
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.num_evicted_tokens > 20
    fresh = make_engine(**evicting("h2o") | changes)
    check_that_a_fresh_engine_goes_on_alike(engine, fresh, tmp_path / "lazy")
    assert fresh.counters.num_moved_tokens == 0


def test_a_replay_goes_on_where_it_was_in_its_trace(running, make_engine, evicting, tmp_path):
    recorded = running()
    rest(recorded)
    engine = running(trace=recorded.trace)
    fresh, other = (make_engine(**evicting("h2o"), trace=recorded.trace) for _ in range(2))
    places = dict(engine.loop.scheduler.victims._next)
    check_that_a_fresh_engine_goes_on_alike(engine, fresh, tmp_path / "replay")
    other.load_snapshot(tmp_path / "replay")
    assert other.loop.scheduler.victims._next == places != {}
    assert fresh.counters.num_evicted_tokens == recorded.counters.num_evicted_tokens > 60


def test_a_replay_of_another_trace_or_a_policy_in_its_place_is_refused(running, make_engine, evicting, tmp_path):
    recorded = running()
    running(trace=recorded.trace).save_snapshot(tmp_path / "replay")
    rest(recorded)  # the trace grows: the engine that was saved replays it no more
    for changes in ({"trace": recorded.trace}, {"trace": VictimTrace()}, {}):
        with pytest.raises(SpecError, match=r"another source of victims: a trace of \d+ events, CRC-32 0x"):
            make_engine(**evicting("h2o") | changes).load_snapshot(tmp_path / "replay")


class LikeH2O(H2OPolicy):
    """Under the same name."""


def test_a_policy_of_the_same_name_and_another_class_is_refused(make_engine, evicting, running, snapshots, tmp_path):
    folder = copied(snapshots, tmp_path, running)
    engine = make_engine(**evicting("h2o"), policy_object=LikeH2O())
    with pytest.raises(SpecError, match=r"source of victims: vtoken\.policies\.h2o\.H2OPolicy there, .*LikeH2O here"):
        engine.load_snapshot(folder)


def copied(snapshots, tmp_path, running):
    if not (snapshots / "whole").exists():
        running().save_snapshot(snapshots / "whole")
    return shutil.copytree(snapshots / "whole", tmp_path / "copy")


def files(folder, item):
    return sorted((path for path in (folder / item).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def remove_data(folder):
    files(folder, "arrays")[-1].unlink()


def truncate_data(folder):
    largest = files(folder, "arrays")[-1]
    largest.write_bytes(largest.read_bytes()[:-100])


def flip_a_bit(folder):
    largest = files(folder, "arrays")[-1]
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def cut_off_while_written(folder):
    (folder / "files.json").unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def forged(old, new):
    """A whole snapshot, with other words in its JSON."""

    def change(folder):
        path = files(folder, "meta")[-1]
        path.write_text(path.read_text().replace(old, new))
        listed = json.loads((folder / "files.json").read_text())
        name = path.relative_to(folder).as_posix()
        listed[name] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
        (folder / "files.json").write_text(json.dumps(listed))

    return change


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (remove_data, "is torn: arrays/.* is missing or was changed: take an older one"),
        (truncate_data, "is torn: arrays/.* is missing or was changed"),
        (flip_a_bit, "is torn: arrays/.* is missing or was changed"),
        (cut_off_while_written, "is torn: its list of files does not read"),
        (forged("snapshot/3", "snapshot/1"), "has the format 'vtoken-jax/snapshot/1', not 'vtoken-jax/snapshot/3'"),
        (forged("RequestTable()", "Popen()"), r"does not read: KeyError\('Popen\(\)'\): .* another version"),
        (shutil.rmtree, "copy holds no snapshot: give a folder that was saved"),
        (empty, "copy holds no snapshot: give a folder that was saved"),
    ],
)
def test_a_torn_or_foreign_snapshot_is_refused_and_the_running_engine_goes_on(
    running, snapshots, tmp_path, breakage, message
):
    folder = copied(snapshots, tmp_path, running)
    breakage(folder)
    engine, untouched = running(), running()
    before = fingerprints(engine)

    with pytest.raises(SpecError, match=message):
        engine.load_snapshot(folder)

    assert fingerprints(engine) == before
    assert rest(engine) == rest(untouched)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 61}, "another pool: num_blocks=60 there, 61 here: make it the same"),
        ({"kv_budget": 17, "interval": 3}, "config: kv_budget=16 there, 17 here; interval=6 there, 3 here: make"),
        ({"chunk_tokens": 8}, "another chunk_tokens: 16 there, 8 here: make it the same"),
    ],
)
def test_a_snapshot_of_another_engine_names_what_differs(
    make_engine, evicting, running, snapshots, tmp_path, changes, message
):
    folder = copied(snapshots, tmp_path, running)
    with pytest.raises(SpecError, match=message):
        make_engine(**evicting("h2o") | changes).load_snapshot(folder)


def one_element_more(weights):
    return weights[0].at[(0,) * weights[0].ndim].add(1.0), *weights[1:]


def norms_exchanged(weights):
    one, other = [index for index, weight in enumerate(weights) if weight.shape == (32,)][:2]
    changed = list(weights)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


@pytest.mark.parametrize("change", [one_element_more, norms_exchanged])
def test_a_snapshot_under_other_weights_is_refused(make_engine, evicting, running, snapshots, tmp_path, change):
    folder = copied(snapshots, tmp_path, running)
    engine = make_engine(**evicting("h2o"))
    engine.runner.weights = change(engine.runner.weights)
    with pytest.raises(SpecError, match=r"another set of weights: bit sum 0x.* there, bit sum 0x.* here"):
        engine.load_snapshot(folder)


def test_weights_in_tiles_and_without_are_the_same_set(make_engine, model_folders):
    runner, folder = make_engine().runner, model_folders("llama")
    plain = tuple(jax.tree.leaves(load_weights(folder, runner.config, "float32")[1]))
    assert [each.shape for each in plain] != [each.shape for each in runner.weights]
    assert _bit_sum(plain) == _bit_sum(runner.weights)


def test_a_folder_that_exists_is_not_overwritten(running, tmp_path):
    with pytest.raises(SpecError, match="exists: give a new folder"):
        running().save_snapshot(tmp_path)
