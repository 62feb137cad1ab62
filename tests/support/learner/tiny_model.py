"""A tiny random Qwen3-MoE checkpoint, small enough to be served in tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import deserialize

from gspo_protocol.digests import tensor_digest
from gspo_protocol.messages import TensorInfo

TINY_VOCAB_SIZE = 512
TINY_EOS_TOKEN_ID = 2


def tiny_qwen3_moe(seed: int = 0) -> Any:
    """A float32 ``Qwen3MoeForCausalLM`` of 2 layers and 4 experts whose distribution is far from flat.

    Weights are drawn wider than transformers' own initialisation: with 0.02 all tokens are almost equally likely and
    a wrong weight would hardly move a log-prob.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        rope_theta=1e6,
        tie_word_embeddings=False,
        eos_token_id=TINY_EOS_TOKEN_ID,
        bos_token_id=0,
        pad_token_id=5,
    )
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                std = 0.3 if ("embed" in name or "lm_head" in name) else 0.12
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.copy_(1.0 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(torch.float32).eval()


def save_tiny_model(directory: Path, seed: int = 0) -> Any:
    """Write checkpoint and byte-level tokenizer to ``directory``; return the model itself, for reference log-probs."""
    model = tiny_qwen3_moe(seed)
    model.save_pretrained(directory)
    _byte_level_tokenizer().save_pretrained(directory)
    return model


def save_tiny_dense(directory: Path, family: Literal["qwen3", "llama"], kv_heads: int, seed: int = 0) -> Any:
    """Write a checkpoint of a small dense model, whose vocabulary is no multiple of 64; return the model itself."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=TINY_VOCAB_SIZE - 12, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=4096,
        tie_word_embeddings=False, eos_token_id=TINY_EOS_TOKEN_ID, bos_token_id=0, pad_token_id=5,
        **({"attention_bias": True, "mlp_bias": False} if family == "llama" else {}),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.12) if parameter.dim() >= 2 else parameter.normal_(1.0, 0.1)
    model = model.to(torch.float32).eval()
    model.save_pretrained(directory)
    _byte_level_tokenizer().save_pretrained(directory)
    return model


def _byte_level_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")


def checkpoint_tensors(directory: Path) -> list[tuple[TensorInfo, bytes]]:
    """Every tensor of ``directory``/model.safetensors, as a rollout receives it."""
    dtypes: dict[str, Literal["float32", "bfloat16"]] = {"F32": "float32", "BF16": "bfloat16"}
    tensors = []
    offset = 0
    for name, entry in deserialize((directory / "model.safetensors").read_bytes()):
        data = bytes(entry["data"])
        info = TensorInfo(
            name=name,
            dtype=dtypes[entry["dtype"]],
            shape=list(entry["shape"]),
            offset=offset,
            num_bytes=len(data),
            digest=tensor_digest(data),
        )
        offset += len(data)
        tensors.append((info, data))
    return tensors


def reference_logprobs(model: Any, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probs of token_ids[1:], each given its prefix, at ``temperature``, float32 [T - 1], by transformers."""
    import torch

    ids_1T = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logprobs_TV = (model(ids_1T).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].numpy()


def tiny_tied_model() -> Any:
    """A float32 ``Qwen3ForCausalLM`` of 2 layers whose output head is its embedding."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)
