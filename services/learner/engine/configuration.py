"""DeepSpeed's own configuration and the optimizer's groups, made of the engine's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed
from torch import nn

from gspo.moe.experts import find_routers
from gspo_services.learner.start import EngineSettings, autoep_config, gathering_config, offload_config
from gspo_services.shared.settings import Learner

_NEVER: Final = 10**9
_ROUTERS: Final = "routers"


def stage_inside(settings: EngineSettings) -> int:
    """Return the ZeRO stage that DeepSpeed uses; the process group must exist: see ``Learner.stage_on``."""
    return settings.learner.stage_on(torch.distributed.get_world_size(), leaves_device=settings.leaves_device)


def parameter_groups(model: nn.Module, learner: Learner) -> list[Any]:
    """Return what the optimizer trains: parameters, or two groups where routers have a learning rate of their own."""
    # Lists: with a generator, checkpoints can be paired with the wrong parameters.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    routers = {id(parameter) for router in find_routers(model).values() for parameter in router.parameters()}
    own = [parameter for parameter in trained if id(parameter) in routers]
    if learner.router_rate_factor == 1 or not own:
        return trained
    others = [parameter for parameter in trained if id(parameter) not in routers]
    # DeepSpeed takes experts that ranks share out of a group by its name. The first group's rate is the one reported.
    return [
        {"params": others, "name": "weights"},
        {"params": own, "name": _ROUTERS, "lr": learner.learning_rate * learner.router_rate_factor},
    ]


def rate_factor(group: Mapping[str, Any], learner: Learner) -> float:
    """Return the factor of the learning rate of one of the optimizer's groups."""
    return learner.router_rate_factor if group.get("name") == _ROUTERS else 1.0


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
                # One pass over the memory, on a host by a third of the time of PyTorch's default. On a GPU it is one kernel
                # for many tensors, where the default launches several for each step of the formula.
                "fused": True,
            },
        },
    }
