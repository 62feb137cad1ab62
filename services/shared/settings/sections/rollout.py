"""The section of the rollouts."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.section import FilePath, Number, OptionalPath, Port, PositiveSeconds, Section
from gspo_services.shared.settings.server_options import objection


class Rollout(Section):
    """SGLang servers and the agent loops in front of them."""

    num_servers: int = Field(2, ge=0)
    """How many rollouts ``gspo run`` starts on this machine. Others may join at any time."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """Ranks that share one copy of the model in each server (SGLang's --tp-size): each has one GPU, or one part of its
    cores. It must divide the model's heads and widths. Known for Llama, Qwen3 and Qwen3-MoE; others are refused above 1."""
    expert_parallel: int = Field(1, ge=1, le=64)
    """Groups of these ranks, each with its own whole experts (--ep-size), for a mixture of experts. It must divide
    tensor_parallel and the number of experts."""
    data_parallel: int = Field(1, ge=1, le=64)
    """Copies of the model in each server (--dp-size), each over tensor_parallel ranks. Several servers do the same."""
    gpus: list[Number] = Field([])
    """GPUs of this machine for the servers that ``gspo run`` starts: tensor_parallel x data_parallel for each, in this
    order. Several servers may share them in equal numbers, and then server_args must have --mem-fraction-static. Numbers as
    nvidia-smi has them, among those of CUDA_VISIBLE_DEVICES. Empty: the GPUs that the learner leaves."""
    cores: list[Number] = Field([])
    """Processor cores for these servers, dealt in equal parts, and on a CPU also to a server's ranks. Empty: all."""
    python: OptionalPath = ""
    """The interpreter for the rollouts that ``gspo run`` starts, and their servers, such as /opt/sglang/bin/python: it may
    have another build of torch than the learner's. Empty: the one that runs ``gspo run``."""
    server_url: str = ""
    """URL of an SGLang server that already runs; the rollout then starts none. The server must see weights_directory."""
    server_port: Port = 0
    """Port of the SGLang server; 0: any free port."""
    server_args: list[str] = Field([])
    """More arguments for sglang.launch_server. Those that change what is sampled or loaded are refused."""
    max_total_tokens: int = Field(65536, ge=256)
    """Size of SGLang's KV cache, in tokens (CPU)."""
    max_running: int = Field(64, ge=1)
    """Episodes in flight per server."""
    chunk_tokens: int = Field(64, ge=1, le=1024)
    """Stream a chunk to the broker after this many new tokens, and at the end of each turn. A crash costs at most one
    chunk."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """How unfinished generations wait for a weight update. retract: their KV cache is computed again under the new weights,
    so that each token's log-prob is that of one policy. in_place: faster, but later tokens see the old cache. With
    lora.publish = "adapter" nothing waits: retract lets them go on with the new adapter, in_place end with their own."""
    weights_directory: FilePath = Path("/dev/shm")
    """The copy of the weights is below this directory (a memory file system); SGLang loads it from there."""
    peer_weights_endpoint: str = ""
    """Also fetch weights from other rollouts, and serve them here. The learner then sends each version to only a few
    rollouts, however many there are. Give an address of this host that the others can reach, such as
    "tcp://10.0.3.7:7004"; port * is any free port. Empty: the learner serves every rollout. With security.keys, each rollout
    needs the others' public keys."""
    start_timeout_s: PositiveSeconds = 600.0
    """SGLang must be healthy within this time."""
    engine_timeout_s: PositiveSeconds = 300.0
    """A generation is given up when SGLang adds nothing to it for this long, including waits for weight updates. So is a
    weight update that takes longer. Their trajectories continue elsewhere. If the server hangs, its rollout ends after three
    such timeouts, or after three failed weight updates in a row."""
    drain_s: PositiveSeconds = 10.0
    """Time to hand back unfinished trajectories on SIGTERM."""
    linger: bool = False
    """When the run is complete: false ends the process with status 0. true ends only SGLang; the process then waits for
    SIGTERM, alive and not ready. A Deployment needs that, because it restarts whatever ends. ``gspo run`` sets false."""
    metrics_port: Port = 9110
    """The first rollout's port; ``gspo run`` gives the next ones port + 1, + 2, ... 0: any free port."""

    @property
    def ranks_per_server(self) -> int:
        """Processes of one server that hold weights; on GPUs each has one."""
        return self.tensor_parallel * self.data_parallel

    @model_validator(mode="after")
    def _server_is_the_learners_policy(self) -> "Rollout":
        if text := objection(self.server_args):
            raise ValueError(f"server_args has {text}")
        return self
