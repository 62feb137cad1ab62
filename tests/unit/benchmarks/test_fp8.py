"""FP8 emulated: each number is the nearest that e4m3 has, and both engines of the benchmarks compute the same with it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from benchmarks.fp8.__main__ import HOOKS, Outcome, table
from benchmarks.fp8.emulation import block_scales, dequantised, experts, hook, linear, quantised, rounded
from benchmarks.study.decoding import Decoder, Order
from gspo_services.prepare.tiny_models.tiny import build_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = CODES[CODES.isfinite()].unique()


def wild(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, with blocks that differ by far."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()
    x[..., : shape[-2] // 2, :] *= 1e-3
    return x


def test_each_number_becomes_the_nearest_one_that_e4m3_has_in_the_scale_of_its_block() -> None:
    x = wild(200, 300)
    scales = block_scales(x)
    assert scales.shape == (2, 3)
    found = quantised(x, scales)
    for row, column in ((0, 0), (1, 2)):
        block = x[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        assert float(scales[row, column]) == float(block.abs().max() / 448)
        mine = found[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)].float()
        scaled = block / scales[row, column]
        least = (scaled.flatten()[:, None] - NUMBERS).abs().amin(dim=1)
        assert torch.equal((scaled - mine).abs().flatten(), least)
        assert float(mine.abs().max()) == 448.0


def test_inputs_have_a_scale_for_each_128_values_of_a_token() -> None:
    x_TK = wild(5, 256)
    whole = rounded(x_TK, rows=1)
    alone = torch.cat(
        [rounded(x_TK[row : row + 1, column : column + 128], rows=1) for row in range(5) for column in (0, 128)]
    )
    assert torch.equal(whole.view(10, 128), alone)


def test_a_block_of_zeros_and_the_largest_numbers_stay_what_they_are() -> None:
    assert torch.equal(rounded(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert rounded(torch.tensor([[3.0e38, -3.0e38]])).tolist() == [[pytest.approx(3.0e38), pytest.approx(-3.0e38)]]
    assert rounded(torch.ones(2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


SGLANG = """
import sys
from gspo_services.shared.sglang_cpu.launch import install_placeholders
install_placeholders()
import torch
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, input_to_float8, per_block_cast_to_fp8
x = torch.load(sys.argv[1])
q, scales = per_block_cast_to_fp8(x)
back = block_quant_dequant(q, scales, [128, 128], torch.float32)
torch.save((q.view(torch.uint8), scales, back, input_to_float8(x[:128, :128])[1]), sys.argv[1])
"""
"""In a process of its own: its placeholders for torchvision would stay."""


def test_sglang_has_the_same_bits_and_the_same_scales(tmp_path: Path) -> None:
    x, file = wild(200, 300), tmp_path / "x.pt"
    torch.save(x, file)
    subprocess.run([sys.executable, "-c", SGLANG, str(file)], check=True, timeout=250)
    q, powers_of_two, back, scale = torch.load(file)
    assert torch.equal(quantised(x, powers_of_two).view(torch.uint8), q)
    assert torch.equal(dequantised(quantised(x, powers_of_two), powers_of_two), back)
    assert float(block_scales(x)[0, 0]) == pytest.approx(float(scale), rel=1e-6)


def test_the_hook_of_sglang_and_the_decoder_of_the_study_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build_model(TOKENIZER)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    exact, prompt = chosen(model, [5, 9, 11], []), [5, 9, 11]
    (answer,) = Decoder(config=model.config, fp8=True, pad_id=0, end_id=len(TOKENIZER)).decode(
        [Order(model.state_dict(), [prompt], 0)], 6
    )[0]
    exact = chosen(model, prompt, answer.ids)
    for layer in model.model.layers:
        for projection in (getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"):
            monkeypatch.setattr(projection, "forward", through_hook(projection))
        own = layer.mlp.experts
        monkeypatch.setattr(own, "forward", through_hook(own))
    assert answer.logprobs == pytest.approx(chosen(model, prompt, answer.ids), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(answer.logprobs, exact, strict=True)) > 0.02


def through_hook(module: torch.nn.Module) -> object:
    """What SGLang's module gives after the hook, in the place of transformers' own forward."""
    called = hook({})

    def projection(x: Tensor) -> Tensor:
        output, bias = called(module, (x[0],), (None, "bias"))
        assert bias == "bias"
        return output[None]

    def mixture(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        named = SimpleNamespace(w13_weight=module.gate_up_proj, w2_weight=module.down_proj)
        made: Tensor = called(named, (x_TH, (weights_TK, ids_TK, None)), None)
        return made

    return projection if isinstance(module, torch.nn.Linear) else mixture


@torch.no_grad()
def chosen(model: Qwen3MoeForCausalLM, prompt: list[int], answer: list[int]) -> list[float]:
    ids = prompt + answer
    logprobs_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    made: list[float] = (
        logprobs_TV[len(prompt) - 1 : -1].gather(1, torch.tensor(answer, dtype=torch.long)[:, None])[:, 0].tolist()
    )
    return made


def test_a_projection_with_a_bias_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bias"):
        hook({})(torch.nn.Linear(2, 2), (torch.ones(1, 2),), (None, None))


def test_hidden_values_are_rounded_too() -> None:
    x_TH, w13_EIH, w2_EHI = wild(4, 8), wild(2, 12, 8, seed=1), wild(2, 8, 6, seed=2)
    ids_TK, weights_TK = torch.tensor([[0, 1]] * 4), torch.tensor([[0.25, 0.75]] * 4)
    gate, up = (linear(x_TH, w13_EIH[1])).chunk(2, dim=-1)
    second = rounded(torch.nn.functional.silu(gate) * up, rows=1) @ rounded(w2_EHI[1]).t()
    both = experts(x_TH, ids_TK, weights_TK, w13_EIH, w2_EHI)
    first = experts(x_TH, ids_TK[:, :1], weights_TK[:, :1], w13_EIH, w2_EHI)
    assert torch.allclose(both - first, 0.75 * second, rtol=1e-4, atol=1e-5 * float(second.abs().max()))


def test_the_table_has_seeds_side_by_side() -> None:
    numbers = {name: 0.5 for name in Outcome.__annotations__ if name not in ("arm", "seed")}
    runs = [Outcome(arm="FP8, proximal anchor, no weights", seed=seed, **numbers | {"clipped": seed / 4}) for seed in (1, 2)]
    assert "| FP8, proximal anchor, no weights | 0.5 / 0.5 |" in table(runs)
    assert "| 25% / 50% |" in table(runs)
    assert "benchmarks.fp8.emulation:hook" in HOOKS
