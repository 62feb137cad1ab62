"""DeepSpeed's own configuration, made of the engine's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed

from gspo_services.learner.start import EngineSettings, autoep_config, gathering_config, offload_config

_NEVER: Final = 10**9


def stage_inside(settings: EngineSettings) -> int:
    """Return the ZeRO stage that DeepSpeed uses; the process group must exist: see ``Learner.stage_on``."""
    return settings.learner.stage_on(torch.distributed.get_world_size(), leaves_device=settings.leaves_device)


def deepspeed_config(settings: EngineSettings, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``deepspeed.initialize`` takes, for ranks that have met."""
    world_size = torch.distributed.get_world_size()
    size = settings.learner.expert_parallel
    stage = stage_inside(settings)
    return {
        # Nominal: micro-batches are packed by tokens and the boundary of a step is set by hand.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without ZeRO the engine clips itself.
        "gradient_clipping": settings.learner.max_grad_norm if stage > 0 else 0.0,
        "steps_per_print": _NEVER,
        "bf16": {"enabled": settings.learner.dtype == "bfloat16"},
        # Summed in bfloat16, the gradient of 120 micro-batches is off by 1.6 % of its norm.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": settings.zero3_persistence_elements,
            **gathering_config(model_config, size),
            **offload_config(settings.learner.offload, pin_memory=settings.device == "cuda"),
        },
        **({} if size == 1 else {"expert_parallel": autoep_config(size, model_config, on_cuda=settings.device == "cuda")}),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learner.learning_rate,
                "betas": list(settings.learner.betas),
                "eps": settings.learner.adam_eps,
                "weight_decay": settings.learner.weight_decay,
                # PyTorch's own: DeepSpeed's is compiled at the first start.
                "torch_adam": True,
                # One pass over the memory. On a host: on OMP_NUM_THREADS threads, like DeepSpeed's own, but built in. On a
                # GPU: one kernel for many tensors, where PyTorch's default launches several for each step of the formula.
                **({"fused": True} if settings.learner.offload != "none" or settings.device == "cuda" else {}),
            },
        },
    }
