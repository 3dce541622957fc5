import json
import random
import shutil
from io import StringIO

import jax.numpy as jnp
import numpy as np
import pytest
from jax_dense_llama import DenseLlama
from rich.console import Console

from vtoken.errors import SpecError
from vtoken.policies import RankedPolicy, get_policy
from vtoken.serving.protocol import SamplingParams
from vtoken_jax.engine import JaxEngine
from vtoken_jax.runner import JaxRunner

rng = random.Random(5)
PROMPTS = [[rng.randrange(96) for _ in range(count)] for count in (45, 9, 30)]
SAMPLING = SamplingParams(max_tokens=20)
POLICIES = ["streaming_llm", "sliding_window", "random", "h2o", "tova", "snapkv", "scissorhands", "paged_eviction"]


def mass_stays(row, positions):
    raise AssertionError(f"the mass of {len(positions)} tokens came to the host")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_a_dense_forward_that_hides_the_victims(
    dense_llama, make_engine, make_oracle, evicting, policy, mode
):
    engine = make_engine(**evicting(policy, mode=mode, low_watermark=1.0, cooldown_steps=1))
    oracle = make_oracle(engine, PROMPTS)
    if isinstance(get_policy(policy), RankedPolicy):
        engine.runner.scores = mass_stays

    outputs = engine.generate(PROMPTS, SAMPLING, progress=False)

    assert [(each.finish_reason, len(each.token_ids)) for each in outputs] == [("length", 20)] * 3
    counters = engine.counters
    assert counters.num_evicted_tokens > 60
    assert (counters.num_recycled_tokens > 0) == (mode == "eager")
    assert counters.num_moved_tokens > 0 or policy == "paged_eviction"  # whole pages leave no holes
    assert oracle.check(dense_llama, outputs) == 60


def test_bfloat16_rounds_and_does_nothing_else(model_folders, make_engine, make_oracle, evicting):
    engine = make_engine(**evicting("h2o"), dtype="bfloat16")
    oracle = make_oracle(engine, PROMPTS)
    assert {str(weight.dtype) for weight in engine.runner.weights} == {"bfloat16"}

    outputs = engine.generate(PROMPTS, SAMPLING, progress=False)

    rounded = DenseLlama(model_folders("llama"), round_to=jnp.bfloat16)
    assert engine.counters.num_evicted_tokens > 60
    assert oracle.check(rounded, outputs, tolerance=2**-4) == 60  # two logits of up to 4, each off by one part in 2^7


def test_freed_and_dead_slots_may_hold_anything(dense_llama, make_engine, make_oracle, evicting):
    """Every bit of a slot that no live token holds is set before each step, which is NaN."""
    engine = make_engine(**evicting("h2o", mode="lazy", low_watermark=0.0))
    oracle = make_oracle(engine, PROMPTS)
    pool, store, step = engine.loop.pool, engine.runner.store, engine.runner.step

    def poisoned_step(rows):
        live = {slot for table in pool.tables.values() for slot in table.live_slots()}
        dead = np.array([[slot not in live] for slot in range(store.spec.num_slots)])
        keys, values = (
            [jnp.where(dead, jnp.uint32(0xFFFFFFFF), plane) for plane in planes] for planes in store.cache[:2]
        )
        store.cache = store.cache._replace(k=tuple(keys), v=tuple(values))
        return step(rows)

    engine.runner.step = poisoned_step
    outputs = engine.generate(PROMPTS[:2], SAMPLING, progress=False)

    assert engine.counters.num_moved_tokens == 0
    assert engine.counters.num_evicted_tokens > 40
    assert oracle.check(dense_llama, outputs) == 40


def test_a_prompt_longer_than_the_pool_is_served(dense_llama, make_engine, make_oracle, evicting):
    engine = make_engine(num_blocks=14, **evicting("streaming_llm", when="pressure"))
    prompts = [PROMPTS[0][:20], PROMPTS[2][:20], [*PROMPTS[0], *PROMPTS[2]]]
    oracle = make_oracle(engine, prompts)

    outputs = engine.generate(prompts, SamplingParams(max_tokens=24), progress=False)

    assert [each.finish_reason for each in outputs] == ["length"] * 3
    assert outputs[2].num_evicted > 40
    assert oracle.check(dense_llama, outputs) >= 72


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(dense_llama, make_engine, make_oracle):
    engine = make_engine(num_blocks=14, policy="none")
    prompts = [PROMPTS[0][:20], PROMPTS[2][:20]]
    oracle = make_oracle(engine, prompts)
    outputs = engine.generate(prompts, SAMPLING, progress=False)
    assert engine.counters.num_preemptions > 0
    assert oracle.check(dense_llama, outputs) >= 40


def test_a_shared_prefix_is_not_computed_twice_and_changes_no_token(make_engine):
    common = PROMPTS[0][:24]
    prompts = [[*common, 5, 6, 7], [*common, 8, 9]]
    plain = make_engine(policy="none").generate(prompts, SAMPLING, progress=False)
    engine = make_engine(policy="none", prefix_caching=True)
    lengths = []
    engine.loop.on_step = lambda report: lengths.extend(len(row.token_ids) for _, row in report.rows)

    outputs = engine.generate(prompts, SAMPLING, progress=False)

    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    assert sum(count for count in lengths if count > 1) == 27 + 2


def test_drawn_tokens_depend_on_seed_and_index_alone(make_engine):
    def run(prompts, seeds, **changes):
        sampling = [SamplingParams(max_tokens=8, temperature=0.8, top_k=20, seed=seed) for seed in seeds]
        return [
            each.token_ids for each in make_engine(policy="none", **changes).generate(prompts, sampling, progress=False)
        ]

    alone = run(PROMPTS[:1], [7])
    beside = run([PROMPTS[1], PROMPTS[0], PROMPTS[0]], [3, 7, 8])
    assert beside[1] == alone[0]
    assert beside[2] != alone[0]


def test_a_stream_gives_the_same_tokens_and_may_be_closed(make_engine):
    engine = make_engine(policy="none")
    expected = engine.generate(PROMPTS[:2], SAMPLING, progress=False)
    found = {0: [], 1: []}
    for index, token_id in engine.stream(PROMPTS[:2], SAMPLING):
        found[index].append(token_id)
    assert [tuple(tokens) for tokens in found.values()] == [each.token_ids for each in expected]

    stream = engine.stream(PROMPTS, SAMPLING)
    next(stream)
    stream.close()
    assert engine.loop.is_idle
    assert engine.loop.pool.pool.num_held == 0


def test_other_tokens_of_other_lengths_compile_nothing_in_the_same_buckets(make_engine, evicting, num_compiles):
    def run(prompts):
        outputs = make_engine(**evicting("h2o")).generate(prompts, SAMPLING, progress=False)
        return [each.token_ids for each in outputs]

    first, before = run(PROMPTS), num_compiles()
    second = run([[95 - token for token in prompt[2:]] for prompt in PROMPTS])
    assert num_compiles() == before
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_progress_is_shown_to_the_end_when_it_is_wanted(make_engine, monkeypatch):
    shown = StringIO()
    monkeypatch.setattr("vtoken_jax.engine.Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    engine = make_engine(policy="none")
    engine.generate(PROMPTS[:2], SAMPLING, progress=False)
    assert shown.getvalue() == ""
    engine.generate(PROMPTS[:2], SAMPLING)
    assert "2/2 requests" in shown.getvalue()
    assert "40/40" in shown.getvalue()


def test_the_tokens_that_end_a_text_are_those_of_the_folder(make_engine, model_folders, tmp_path):
    folder = shutil.copytree(model_folders("llama"), tmp_path / "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    engine = JaxEngine(folder, max_model_len=16)
    assert engine.eos_token_ids == (5, 6)
    bare = JaxRunner(engine.runner.config, "float32", engine.runner.weights)
    assert JaxEngine(bare, max_model_len=16).eos_token_ids == ()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [5, [5, 6], None])
def test_a_text_ends_with_the_tokens_that_transformers_ends_it_with(model_folders, tmp_path, name, ids):
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(model_folders("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps(config | {"eos_token_id": ids}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    expected = () if theirs is None else tuple(np.atleast_1d(theirs).tolist())
    assert JaxEngine(folder, max_model_len=16).eos_token_ids == expected


def test_mistakes_are_refused_with_a_remedy(make_engine):
    with pytest.raises(SpecError, match="config and kv_budget are both given"):
        make_engine(config=make_engine(policy="none").loop.config, kv_budget=4)
    with pytest.raises(SpecError, match="max_model_len=513: give 1 to the model's 512"):
        make_engine(max_model_len=513)
    with pytest.raises(SpecError, match="a text prompt needs a tokenizer"):
        make_engine(policy="none").generate("text")
    with pytest.raises(SpecError, match="vocab_size=96"):
        make_engine(policy="none").generate([[3, 96]], progress=False)
    with pytest.raises(SpecError, match=r"no config\.json"):
        JaxEngine("/nowhere")
