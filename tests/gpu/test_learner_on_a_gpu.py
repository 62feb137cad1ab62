"""The learner on one GPU: nccl, bfloat16, variable-length flash attention, memory, offload, speed.

It needs an environment with CUDA builds of PyTorch and DeepSpeed (deploy/docker/learner.Dockerfile) and pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gspo.model.attention import segment_attention
from gspo.model.logprobs import chunked_logprobs
from tests.support.learner.parallel_jobs import Results, gradient_job, job, require_gradients, run_jobs
from tests.support.learner.ranks import Ranks
from tests.support.learner.training_groups import write_model_and_groups

pytestmark = pytest.mark.gpu

LAYOUTS = [(0, "none"), (1, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer_and_parameters")]
QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16, from the vendor's data sheets."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    write_model_and_groups(directory)
    return directory


@pytest.fixture(scope="module")
def on_cpu(work: Path) -> Results:
    return run_jobs(work, 1, [gradient_job("single", zero_stage=0), job("half-cpu", zero_stage=1, dtype="bfloat16")])


@pytest.fixture(scope="module")
def on_gpu(work: Path) -> Results:
    jobs = [gradient_job(f"{stage}-{offload}", zero_stage=stage, offload=offload) for stage, offload in LAYOUTS]
    jobs += [
        job(
            f"half-{stage}-{offload}",
            zero_stage=stage,
            offload=offload,
            dtype="bfloat16",
            steps=2,
            save_after=1,
        )
        for stage, offload in LAYOUTS
        if stage > 0
    ]
    jobs.append(job("resumed", zero_stage=1, dtype="bfloat16", resume="half-3-optimizer_and_parameters"))
    return run_jobs(work, 1, jobs, accelerator="cuda")


def test_float32_gradients_on_the_gpu_are_those_of_the_cpu(work: Path, on_cpu: Results, on_gpu: Results) -> None:
    for stage, offload in LAYOUTS:
        name = f"{stage}-{offload}"
        assert on_gpu[0][name]["losses"] == pytest.approx(on_cpu[0]["single"]["losses"], rel=1e-4), name
        require_gradients(work, name, "single", tolerance=1e-4)


def test_bfloat16_trains_with_and_without_offload_and_resumes(on_cpu: Results, on_gpu: Results) -> None:
    for stage, offload in LAYOUTS[1:]:
        found = on_gpu[0][f"half-{stage}-{offload}"]
        assert found["losses"][0] == pytest.approx(on_cpu[0]["half-cpu"]["losses"][0], abs=0.02)
        assert found["masters_on"] == ["cuda" if offload == "none" else "cpu"]
    uninterrupted = on_gpu[0]["half-3-optimizer_and_parameters"]["losses"]
    assert on_gpu[0]["resumed"]["losses"] == pytest.approx(uninterrupted[-1:], abs=0.02)


def test_a_learner_that_leaves_the_gpu_trains_on_as_one_that_stays(work: Path) -> None:
    arguments = [str(work), "leaving"]
    with Ranks("tests.support.learner.learner_worker", arguments, 1, work / "leaving", accelerator="cuda") as ranks:
        ranks.finish(300)
    found = json.loads((work / "leaving-0-of-1.json").read_text())
    for name, (stays, leaves) in found["losses"].items():
        assert leaves == pytest.approx(stays, rel=1e-3), name
    at_home = {name: ["cpu" if name == "offload" else "cuda"] for name in found["losses"]}
    assert found["where"] == at_home


def test_variable_length_flash_attention_equals_the_loop_over_segments() -> None:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = (0, 1, 8, 136, 640)
    shapes = ((1, 8, 640, 64), (1, 2, 640, 64), (1, 2, 640, 64))
    on_cpu = [torch.randn(shape, generator=generator).bfloat16().float().requires_grad_() for shape in shapes]
    on_gpu = [tensor.detach().cuda().bfloat16().requires_grad_() for tensor in on_cpu]
    outer = torch.randn(1, 640, 8, 64, generator=generator)
    loop, _ = segment_attention(torch.nn.Identity(), *on_cpu, None, cu_seqlens=cu_seqlens)
    flash, _ = segment_attention(torch.nn.Identity(), *on_gpu, None, cu_seqlens=cu_seqlens)
    (loop * outer).sum().backward()
    (flash.float() * outer.cuda()).sum().backward()
    pairs = [(loop, flash), *((ours.grad, theirs.grad) for ours, theirs in zip(on_cpu, on_gpu, strict=True))]
    for expected, found in pairs:
        assert expected is not None
        assert found is not None
        assert (found.float().cpu() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("float32", [False, True])
def test_log_probs_never_hold_the_logits_and_a_float32_head_neither_rounds_them_nor_copies_the_weight(float32: bool) -> None:
    tokens, vocab, hidden = 4096, 151_936, 1024
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = chunked_logprobs(states, weight, targets, torch.ones(tokens, device="cuda"), chunk_tokens=512, float32=float32)
    result.logprobs_T.sum().backward()
    logits = tokens * vocab * 4
    # The rest is the float32 gradient of the weight, its bfloat16 copy, and a chunk of logits with its gradient.
    assert torch.cuda.max_memory_allocated() - before < vocab * hidden * 8 + 0.5 * logits
    with torch.no_grad():
        exact = (
            torch.log_softmax(states[:64].double() @ weight.double().t(), dim=-1).gather(-1, targets[:64, None]).squeeze(-1)
        )
        off = (result.logprobs_T[:64] - exact).abs().max().item()
    assert (off < 1e-3) == float32, off


@pytest.mark.parametrize("softcap", [None, 10.0])
def test_the_kernels_of_the_head_give_what_plain_pytorch_gives(softcap: float | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(size, 256, device="cuda", generator=generator) for size in (700, 151_936)]
    targets = torch.randint(151_936, (700,), device="cuda", generator=generator)
    upstream = torch.randn(2, 700, device="cuda", generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.01)):
        found = []
        for fused in (True, False):
            leaves = [each.to(dtype).requires_grad_() for each in made]
            given = {"chunk_tokens": 300, "with_entropy": True, "entropy_gradient": True, "softcap": softcap}
            result = chunked_logprobs(*leaves, targets, 0.5 + upstream[0].abs(), fused=fused, **given)
            assert result.entropies_T is not None
            torch.stack([result.logprobs_T, result.entropies_T]).backward(upstream)
            found.append([result.logprobs_T, result.entropies_T, *(leaf.grad for leaf in leaves)])
        for ours, plain in zip(*found, strict=True):
            assert (ours.float() - plain.float()).norm() <= tolerance * plain.float().norm()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", list(QWEN3))
def test_a_step_of_a_model_of_random_weights_uses_the_gpu(size: str, record_property: Callable[[str, object], None]) -> None:
    common = {
        "vocab_size": 151_936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": size in ("0.6B", "1.7B", "4B"),
    }
    offload = "optimizer" if size == "8B" else "none"
    billions = float(size.removesuffix("B"))
    # Weights, float32 gradients, masters and moments; an offloaded optimizer keeps its part on the host.
    wanted, on_host = (8e9 * billions, 18e9 * billions) if offload == "optimizer" else (20e9 * billions, 0.0)
    if torch.cuda.get_device_properties(0).total_memory < wanted + 10e9:
        pytest.skip(f"{size} needs {wanted / 1e9 + 10:.0f} GB of GPU memory")
    if psutil.virtual_memory().available < on_host:
        pytest.skip(f"{size} with an offloaded optimizer needs {on_host / 1e9:.0f} GB of host memory")
    command = [sys.executable, "-m", "tests.support.learner.gpu_worker", json.dumps(common | QWEN3[size]), offload]
    environment = os.environ | {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    found |= {"size": size, "gpu": torch.cuda.get_device_name(), "mfu": None if peak is None else found["flops"] / peak}
    record_property("speed", found)
    print(json.dumps(found))
    assert found["masters_on"] == ["cuda" if offload == "none" else "cpu"]
    if peak is not None and offload == "none":
        assert 0.1 < found["mfu"] < 1, found
