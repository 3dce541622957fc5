"""What a request may ask for beside its tokens, all in one batch: several outputs, an adapter, a grammar."""

import copy
import gc
import json
import shutil
import threading

import pytest

SETTINGS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always"}
DIGITS = range(18, 28)  # ids of the digits in `talking_llama`'s vocabulary
RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def talking_llama(tiny_llama, tmp_path_factory):
    """The tiny model with a tokenizer: three special tokens, one for each byte, fillers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<filler {number}>" for number in range(len(names), 512)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("talking_llama")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    assert [names[index] for index in DIGITS] == list("0123456789")
    return str(folder)


@pytest.fixture(scope="module")
def adapter(reference, tmp_path_factory):
    """A random LoRA adapter: its folder, and the reference with the adapter merged into the weights."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(2)
    merged, weights = copy.deepcopy(reference), {}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    for number, layer in enumerate(merged.model.model.layers):
        for name in names:
            weight = getattr(layer.self_attn, name).weight
            down = torch.randn(RANK, weight.shape[1], generator=draw) * 0.1
            up = torch.randn(weight.shape[0], RANK, generator=draw) * 0.1
            weight.data += ALPHA / RANK * (up @ down)
            path = f"base_model.model.model.layers.{number}.self_attn.{name}"
            weights |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder), merged


def _constrained(reference, allowed):
    """The reference of a request whose grammar allows the same tokens at every step."""
    import torch

    class Constrained(type(reference)):
        def logprobs(self, tokens, deaths):
            table = super().logprobs(tokens, deaths)
            hidden = torch.ones(table.shape[1], dtype=torch.bool)
            hidden[list(allowed)] = False
            return torch.log_softmax(table.masked_fill(hidden, -torch.inf), -1)

    constrained = object.__new__(Constrained)
    constrained.model = reference.model
    return constrained


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_several_outputs_an_adapter_and_a_grammar_in_one_batch(
    talking_llama, adapter, reference, tokens, monkeypatch, is_async
):
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm_world import World

    folder, merged = adapter
    may_compile = threading.Event()
    create_grammar = StructuredOutputManager._create_grammar
    monkeypatch.setattr(
        StructuredOutputManager,
        "_create_grammar",
        lambda self, request: may_compile.wait(60) and create_grammar(self, request),
    )
    regex = {"structured_outputs": StructuredOutputsParams(regex="[0-9]{80}")}
    with World(
        talking_llama,
        SETTINGS,
        skip_tokenizer_init=False,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=2,
        async_scheduling=is_async,
    ) as engine:
        number = engine.submit(tokens(70), 50, sampling=regex)
        for _ in range(5):  # steps without a token: the one request waits for its grammar
            assert engine.step() == []
        may_compile.set()
        drawn = engine.submit(tokens(90), 50, sampling={"n": 3, "temperature": 0.9, "seed": 5})
        adapted = engine.submit(tokens(100), 50, lora=LoRARequest("adapter", 1, folder))
        plain = engine.submit(tokens(60), 50)
        engine.run(max_quiet_steps=10**6)
        children = range(drawn, drawn + 3)
        assert len({tuple(engine.outcomes[key].tokens) for key in children}) == 3
        assert all(engine.outcomes[key].epochs[0].deaths for key in engine.outcomes)
        engine.assert_exact(reference, [*children, plain])
        engine.assert_exact(merged, [adapted])
        assert set(engine.outcomes[number].tokens) <= set(DIGITS)
        engine.assert_exact(_constrained(reference, DIGITS), [number])
        for key, other in ((adapted, reference), (plain, merged), (number, reference)):
            with pytest.raises(AssertionError, match=r"other tokens|logprobs differ"):
                engine.assert_exact(other, [key])
        engine.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_compiled_model_stays_exact(world, reference, tokens, mode):
    from vllm.config import CompilationMode

    settings = {**SETTINGS, "mode": mode, "low_watermark": 1.0}
    gc.collect()  # vLLM's matrices of earlier engines read a tensor when they go, which aborts Python under a compiler
    with world(settings, enforce_eager=False, enable_prefix_caching=True) as engine:
        assert engine.runner.compilation_config.mode != CompilationMode.NONE
        prefix = tokens(64)
        for length, policy in ((70, "random"), (40, "streaming_llm"), (130, "h2o")):
            engine.submit(prefix + tokens(length), 40, vtoken_policy=policy)
        engine.run()
        assert (engine.counts["recycled"] > 0) == (mode == "eager")
        assert engine.counts["moves"] > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()
