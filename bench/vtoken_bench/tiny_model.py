"""A random Llama of 2 layers with a tokenizer: what an engine needs, and nothing that takes time."""

from pathlib import Path
from typing import Any

__all__ = ["NUM_QUERY_HEADS", "VOCABULARY", "tiny_llama", "write_tiny_model"]

VOCABULARY = 512
NUM_QUERY_HEADS = 4


def tiny_llama(head_size: int = 32, max_positions: int = 4096) -> Any:
    """``LlamaForCausalLM`` in float32 with 2 KV heads; its outputs depend strongly on every token of the context.

    ``head_size``: 32 is the least that vLLM's attention for CPUs takes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=NUM_QUERY_HEADS,
        num_key_value_heads=2,
        head_dim=head_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.15,  # smaller, and every context would give the same tokens
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


def write_tiny_model(folder: Path, model: Any = None) -> None:
    """Writes ``model`` (``tiny_llama()``) with a tokenizer that makes a token of each byte of a text."""
    from transformers import logging

    logging.disable_progress_bar()
    (tiny_llama() if model is None else model).save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """Its words are bytes, and pairs of letters, which only a model says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [first + second for first in letters for second in letters][: VOCABULARY - len(words)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
