"""Plain PyTorch on CPU as an SGLang out-of-tree platform.

Every fused operation runs its ``forward_native`` reference, attention is SDPA (``torch_native``), process groups are gloo,
nothing is captured in graphs. It is correct, not fast: scheduler, radix cache, HTTP and weight updates are SGLang's own.
"""

import gc
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from gspo_services.shared.weights import xxh3_checksum


def hash_with_xxh3(weight_checker: ModuleType) -> None:
    """Replace the hash of ``sglang.srt.utils.weight_checker``. Each checksum names its hash, so a reader can tell."""
    weight_checker._hash_tensor = xxh3_of_tensor  # type: ignore[attr-defined]


def xxh3_of_tensor(tensor: torch.Tensor) -> str:
    """Hash a tensor's bytes, of any shape and type."""
    return xxh3_checksum([tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data])


class TorchCpuPlatform(SRTPlatform):
    """Answers SGLang's questions to its platform for a machine that has only a CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """In each worker, replace compiled functions without a PyTorch reference, decoding, and the hash of weights, and
        let weight updates change single elements.
        """
        import sglang.srt.batch_invariant_ops as batch_invariant_ops
        from sglang.srt.configs import update_config
        from sglang.srt.layers import sampler
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.lora import layers as lora_layers
        from sglang.srt.lora import lora_manager
        from sglang.srt.lora.backend import torch_backend
        from sglang.srt.managers import schedule_policy
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
        from sglang.srt.model_loader import loader
        from sglang.srt.utils import weight_checker

        from gspo_services.shared.sglang_cpu.decode_backend import BatchedDecodeBackend
        from gspo_services.shared.sglang_cpu.experts import enable_local_experts
        from gspo_services.shared.sglang_cpu.families import patch_when_built
        from gspo_services.shared.sglang_cpu.group_prompts import share_prompts
        from gspo_services.shared.sglang_cpu.lora_slots import pin_nothing, report_slots
        from gspo_services.shared.sglang_cpu.murmur import murmur_hash32
        from gspo_services.shared.sglang_cpu.platform import hash_with_xxh3

        # By default routed-expert capture registers its host buffer with CUDA, which does not exist here.
        ALLOC_MEMORY_FUNCS["cpu"] = _allocate_plain
        # --enable-deterministic-inference gives each request a sampling seed. Its hash is a compiled operation, and its
        # batch-invariant matrix products are Triton kernels without a CPU counterpart.
        sampler.murmur_hash32 = murmur_hash32
        # The loop over requests in SGLang's own backend took most of a decoding step.
        ATTENTION_BACKENDS["torch_native"] = BatchedDecodeBackend
        batch_invariant_ops.enable_batch_invariant_mode = _keep_ordinary_kernels
        hash_with_xxh3(weight_checker)
        enable_local_experts(fused_moe_native)
        share_prompts(schedule_policy)
        pin_nothing(lora_layers, torch_backend)
        report_slots(lora_manager, weight_checker)
        patch_when_built(loader)
        # For compiled kernels SGLang rounds heads and widths up on a CPU. Without that, ranks have the shards that they have
        # on GPUs, and share heads of keys as there.
        update_config.DEFAULT_MOE_PADDING_SIZE = 1
        update_config.get_num_heads_padding_size = _no_padding

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Let --enable-deterministic-inference accept the only attention of this platform, with the prefix cache.

        SGLang turns the cache off where it could change the last bits of a result. It can do that here too (1e-6 in
        float32), but otherwise the cache, which weight updates must flush, would never run on CPU.
        """
        from sglang.srt.arg_groups import choices

        from gspo_services.shared.sglang_cpu.families import set_arguments
        from gspo_services.shared.sglang_cpu.lora_slots import announce_slots

        announce_slots(server_args)
        set_arguments(server_args, _model_type(Path(server_args.model_path)))
        for backends in (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ):
            if "torch_native" not in backends:
                backends.append("torch_native")

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """The only device is always current."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        """No compute capability: nothing may choose a kernel by it."""

    def empty_cache(self) -> None:
        gc.collect()

    def synchronize(self) -> None:
        """Operations on the CPU are done when they return."""

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def _allocate_plain(
    dims: Any, dtype: torch.dtype, device: Any, pin_memory: bool, allocator: Any, registration_granularity_bytes: Any = None
) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def _model_type(directory: Path) -> str:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return str(config.get("text_config", config).get("model_type"))


def _no_padding(*args: Any, **kwargs: Any) -> int:
    """Replaces the multiple to which heads are rounded up."""
    return 1


def _keep_ordinary_kernels(*args: Any, **kwargs: Any) -> None:
    """Replaces batch-invariant kernels: on one thread the ordinary ones give the same result at every batch size in use."""
