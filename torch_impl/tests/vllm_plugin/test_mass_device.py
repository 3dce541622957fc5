"""Attention mass on a GPU's cache, in its physical orders, and on the CPU's: one collector, one set of expectations.

The kernels run in Triton's interpreter.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

LENGTHS, QUERIES = (70, 5, 33, 40, 64), (1, 1, 1, 20, 3)
ASKED = {"0": 0, "2": 4, "3": 0, "4": 2}  # row -> window; nobody asks for row 1
SINGLE = (0, 2)  # rows of one query among them
UNTOUCHED = 7.0


@pytest.fixture(scope="module", autouse=True)
def kernels_run():
    """Where there is no GPU, in the interpreter."""
    from vtoken_torch.kernels import decode, decode_kernels

    sys.path.append(str(Path(__file__).parents[1] / "kernels"))
    from triton_interpreter import interpreted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("split_kernel", "reduce_kernel", "mass_kernel"):
            patch.setattr(decode, name, interpreted(getattr(decode_kernels, name)))
        yield


class _Stock:
    """Stands for vLLM's implementation: it says the same of every row."""

    def __init__(self, step):
        self.scale, self.logits_soft_cap, self.sinks = step.scale, step.softcap, step.sinks
        self.head_size, self.num_calls = 64, 0

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None):
        self.num_calls += 1
        return output.fill_(UNTOUCHED)


def make_step(order, lengths=LENGTHS, queries=QUERIES, **case):
    """``order``: None is the CPU's cache; else the axes of all layers' memory, NaN where no token lies."""
    from vllm_step import KernelStep

    step = KernelStep(lengths, queries, **{"num_heads": 6, "num_kv_heads": 2, **case})
    if order is None:
        return step
    sizes = dict(zip("LBHNC", (2, *step.cache.shape), strict=True))
    memory = torch.full([sizes[axis] for axis in order], torch.nan, dtype=step.cache.dtype)
    step.cache = memory.permute([order.index(axis) for axis in "LBHNC"])[1]
    for blocks, keys, values in zip(step.table, step.keys, step.values, strict=True):
        slots = torch.arange(len(keys))
        step.cache[blocks[slots // 32].long(), :, slots % 32] = torch.cat([keys, values], dim=-1)
    step.layer = SimpleNamespace(impl=_Stock(step), kv_cache=step.cache)
    # All that is read of vLLM's metadata: lengths are known on the host, and nobody waits for those on the device.
    step.metadata = SimpleNamespace(num_actual_tokens=sum(queries), block_table=step.table)
    return step


def collect(step, monkeypatch, asked, replaces=True, num_layers=2):
    """Masses by row, and what the last layer gave out."""
    from vtoken_torch.vllm_plugin.mass import collector as module

    monkeypatch.setattr(module, "tensor_model_parallel_all_reduce", lambda masses: masses)
    collector = module.MassCollector(lambda: [step.layer], replaces=replaces)
    collector.begin([step.ask(int(req_id), window) for req_id, window in asked.items()])
    outputs = [step.forward() for _ in range(num_layers)]
    masses = {int(req_id): each for req_id, each in collector.end().items()}
    assert collector.num_asks == 0
    return masses, outputs[-1]


def assert_masses(step, masses, asked):
    assert sorted(masses) == sorted(map(int, asked))
    for req_id, window in asked.items():
        expected = step.weights(int(req_id), {}).sum(0)
        expected = expected[-window:] if window else expected.sum(0, keepdim=True)
        found = masses[int(req_id)]
        assert found.shape == expected.shape
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5, f"row {req_id}"


@pytest.mark.parametrize(
    ("order", "replaces"),
    [(None, True), ("LBHNC", True), ("LBNHC", True), ("BLNHC", True), ("BHLNC", True), ("LBNHC", False)],
)
def test_masses_are_the_same_wherever_the_keys_lie(monkeypatch, order, replaces):
    step = make_step(order)
    masses, output = collect(step, monkeypatch, ASKED, replaces)
    assert_masses(step, masses, ASKED)
    if order is None:
        return
    assert step.layer.impl.num_calls == 2  # rows that nobody asks for, and chunks, are vLLM's
    expected = torch.full_like(output, UNTOUCHED)
    if replaces:
        for row in SINGLE:
            expected[step.starts[row]] = step.attention({})[step.starts[row]]
    assert torch.allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_vllms_kernel_does_not_run_where_every_row_is_ours(monkeypatch, dtype, tolerance):
    from vtoken_torch.vllm_plugin.mass import queries_device

    monkeypatch.setattr(queries_device, "_LOGITS", 2 * 6 * 96)  # two rows at once
    step = make_step("LBNHC", (70, 5, 33), (1, 1, 1), dtype=dtype)
    asked = {"0": 0, "1": 4, "2": 0}
    masses, output = collect(step, monkeypatch, asked)
    assert step.layer.impl.num_calls == 0
    assert_masses(step, masses, asked)
    assert float((output.double() - step.attention({})).abs().max()) < tolerance * float(step.attention({}).abs().max())
    masses, output = collect(make_step("LBNHC", (70, 5, 33), (1, 1, 1)), monkeypatch, asked, replaces=False)
    assert torch.equal(output, torch.full_like(output, UNTOUCHED))  # the score pass leaves attention to vLLM


@pytest.mark.parametrize("case", [{"softcap": 2.0}, {"sinks": torch.tensor([0.7, -3.0, 5.0, 0.0, 1.0, 2.0])}])
def test_what_the_kernels_do_not_know_is_left_to_vllm_and_scored_beside_it(monkeypatch, case):
    step = make_step("LBNHC", **case)
    masses, output = collect(step, monkeypatch, ASKED)
    assert_masses(step, masses, ASKED)
    assert torch.equal(output, torch.full_like(output, UNTOUCHED))


def test_a_quantized_output_is_vllms(monkeypatch):
    step, asked = make_step("LBNHC", (70, 5), (1, 1)), {"0": 0, "1": 0}

    def forward():
        output = torch.zeros_like(step.query)
        return step.layer.impl.forward(
            step.layer, step.query, None, None, step.cache, step.metadata, output, torch.ones(1)
        )

    monkeypatch.setattr(step, "forward", forward)
    masses, output = collect(step, monkeypatch, asked)
    assert_masses(step, masses, asked)
    assert step.layer.impl.num_calls == 2
    assert torch.equal(output, torch.full_like(output, UNTOUCHED))


def test_steps_without_asks_and_profiling_runs_are_vllms(monkeypatch):
    step = make_step("LBNHC", (70, 5), (1, 1))
    collect(step, monkeypatch, {"0": 0, "1": 0})
    impl, output = step.layer.impl, torch.zeros_like(step.query)
    impl.forward(step.layer, step.query, None, None, step.cache, step.metadata, output)
    impl.forward(step.layer, step.query, None, None, step.cache, None, output)
    assert impl.num_calls == 2
    assert torch.equal(output, torch.full_like(output, UNTOUCHED))


@pytest.mark.parametrize("name", ["flash_attn:FlashAttentionImpl", "triton_attn:TritonAttentionImpl"])
def test_vllms_own_implementations_can_be_watched(name):
    from vtoken_torch.vllm_plugin.mass.attention_device import DeviceAttention

    module, owner = name.split(":")
    owner = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), owner)
    impl = owner.__new__(owner)
    impl.__dict__ |= {"logits_soft_cap": 0, "sinks": None, "head_size": 64}
    attention = DeviceAttention(replaces=True)
    attention.watch([SimpleNamespace(impl=impl)], SimpleNamespace(num_asks=0))
    assert type(impl) is not owner
    assert isinstance(impl, owner)
    assert attention.replaces


@pytest.fixture
def strided_engine(monkeypatch):
    """vLLM's CPU engine on a GPU's cache: plain torch stands for the backend, everything of ours is the GPU's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vtoken_torch.copy_engine.fake_device import FakeDevice
    from vtoken_torch.kernels.move import move_tokens_reference
    from vtoken_torch.vllm_plugin import device_layout, worker_side
    from vtoken_torch.vllm_plugin.mass.attention import WatchedAttention
    from vtoken_torch.vllm_plugin.mass.attention_device import DeviceAttention

    num_calls = []

    def write(self, layer, key, value, kv_cache, slot_mapping):
        blocks, offsets = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[blocks, :, offsets] = torch.cat([key, value], dim=-1)[: len(slot_mapping)]

    def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales):
        if attn_metadata is None:
            return output
        num_calls.append(attn_metadata.num_actual_tokens)
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            blocks = attn_metadata.block_table[row, : -(-length // kv_cache.shape[2])].long()
            keys, values = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].chunk(2, dim=-1)
            queries = query[starts[row] : starts[row + 1]].transpose(0, 1)
            visible = torch.ones(queries.shape[1], length, dtype=torch.bool).tril(length - queries.shape[1])
            output[starts[row] : starts[row + 1]] = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, scale=self.scale, enable_gqa=True
            ).transpose(0, 1)
        return output

    def mover(layers):
        return device_layout.DeviceTokenMover([each.kv_cache for each in layers], FakeDevice(eager={"compute"}))

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", write)
    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", attend)
    monkeypatch.setattr(device_layout, "move_tokens", move_tokens_reference)
    monkeypatch.setattr(worker_side, "token_mover", mover)
    monkeypatch.setattr(WatchedAttention, "of", staticmethod(lambda layers, replaces: DeviceAttention(replaces)))
    return num_calls


@pytest.mark.parametrize("source", ["attention", "score_pass"])
def test_an_engine_evicts_by_the_masses_of_the_kernels(world, reference, tokens, strided_engine, source):
    from vllm_mass import MassWatch

    settings = {"policy": "h2o", "kv_budget": 30, "interval": 6, "when": "always", "signal_source": source}
    with world(settings, max_num_batched_tokens=40) as engine:
        seen = MassWatch(engine, every=8 if source == "score_pass" else 1)
        engine.submit(tokens(45), 20)
        engine.submit(tokens(33), 20, vtoken_policy="tova")
        engine.submit(tokens(20), 6, vtoken_off=True)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert seen.assert_chosen_by(reference) > 30
        assert engine.counts["moves"] > 5
        assert engine.counts["recycled"] > 10
        decoded = 2 in strided_engine[4:]  # a step of the two requests that ask, in vLLM's kernel
        assert decoded == (source == "score_pass")


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_live_words_of_a_packed_row(block_size):
    from vtoken_torch.vllm_plugin.mass.queries_device import first_words

    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size]
    words = first_words(torch.tensor(lengths, dtype=torch.int32), 3, block_size)
    assert words.dtype == torch.int32
    assert words.shape == (5, 3, -(-block_size // 32))
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1).flatten(2)
    assert bits[..., block_size:].sum() == 0
    assert bits.sum((1, 2)).tolist() == lengths
    live = bits[..., :block_size].flatten(1)
    assert all(row[:length].all() for row, length in zip(live, lengths, strict=True))
