"""The sections of the learner: how it trains, and which weights."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from gspo_protocol.limits import MAX_ADAPTER_NAME, MAX_ADAPTERS
from gspo_services.shared.settings.sections.section import Number, OptionalPath, Port, Section

LoraTarget = Literal["attention", "mlp", "experts"]
Decay = Annotated[float, Field(ge=0, lt=1)]
LEAST_EPS: Final = 1e-20
"""A gradient below some 1e-21 has a mean in float32, but its square is 0 there: Adam's step is then mean / eps."""
ADAPTER: Final = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{MAX_ADAPTER_NAME - 1}}}", re.ASCII)


class Learner(Section):
    """Training with DeepSpeed: ranks, optimizer, memory, checkpoints, and how weights are published."""

    num_ranks: int = Field(1, ge=1)
    """Processes that ``gspo learner`` starts on this machine (gloo on CPU, nccl on GPU)."""
    gpus: list[Number] = Field([])
    """GPUs of this machine for the ranks that ``gspo run`` starts, one each. Empty: the first GPUs that rollout.gpus does
    not name."""
    cores: list[Number] = Field([])
    """Processor cores for these ranks, which share them. Empty: all."""
    threads: int = Field(0, ge=0)
    """Processor threads of each rank. 0: as OMP_NUM_THREADS says, which ``gspo run`` sets to 1 unless it is set. Without a
    GPU, more help where the learner never waits and cores are idle: see ``gspo doctor``. The number decides the last bits of
    the weights, so a run that continues, or is replayed, needs the same."""
    python: OptionalPath = ""
    """The interpreter for the learner that ``gspo run`` starts. Empty: the one that runs ``gspo run``."""
    num_nodes: int = Field(1, ge=1)
    """Machines that train together. ``gspo learner`` runs on each, and each has num_ranks processes."""
    node_rank: int = Field(0, ge=0)
    """This machine's number, as in ``--set learner.node_rank=1``. Number 0 talks to the broker; each serves
    its ranks' parts of the weights."""
    rendezvous_address: str = ""
    """HOST:PORT of machine 0, where the ranks of several machines find each other; rank 0 opens it."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO stage. 0 replicates everything; 1 partitions optimizer states, 2 also gradients, 3 also parameters.
    On one rank in float32 there is nothing to partition, and 1 runs as 0 does, with the same weights."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share a layer's experts (DeepSpeed's AutoEP). It must divide the number of ranks and the number of experts.
    1: every rank has all experts, and only ZeRO partitions them. See docs/guide/learner.md."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence's tokens (Ulysses), for sequences whose activations do not fit on one rank. It must
    divide the number of ranks and of attention heads. 1: each rank has whole sequences. See docs/guide/learner.md."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """What is kept in the host's memory instead of the GPU's; this is slower. optimizer: master weights and Adam's moments,
    and Adam steps there; needs zero_stage 1 or higher. optimizer_and_parameters: the weights too, fetched layer by layer;
    needs zero_stage 3."""
    collective_timeout_s: float = Field(1800.0, ge=1)
    """How long the ranks wait in a collective for a missing rank before they end with an error. On CPU, the death of a rank
    is noticed at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass; master weights are float32."""
    spread_masters: Literal["evenly", True, False] = "evenly"
    """With dtype = "bfloat16": each float32 master begins anywhere among the values that round to the model's weight. The
    policy is the same to the bit, and steps that are small beside bfloat16's spacing count from the first one. false: a
    master begins as the weight, which stays as it is until steps add up to half of the spacing. true: as recorded before
    evenly was there; the masters of powers of two, such as 1, fall more easily than they rise."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's learning rate. It is constant after warmup_steps; schedule.learning_rate changes it during a run."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from learning_rate / warmup_steps."""
    router_rate_factor: float = Field(1.0, ge=0, le=100)
    """Mixture of experts only: the routers' learning rate is this times that of all other weights, also in warm-up and
    schedules. 0: the routers stay as they are, to the bit; their gradients still count in the gradient norm. It may change
    when a run continues."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    adam_eps: float = Field(1e-8, gt=0, le=1)
    """AdamW's eps, which is added to the root of the second moment. It must be small beside a gradient, or steps shrink with
    it: MiniMax-M1 saw gradients of 1e-18 to 1e-5, and trains with 1e-15."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm, over all parameters and ranks. 0 leaves them."""
    max_tokens_per_micro_batch: int = Field(4096, ge=16)
    """The most tokens of one packed micro-batch on one rank; sequence_parallel ranks hold so many times as much together. A
    longer sequence is alone in its micro-batch."""
    share_prompts: bool = True
    """Sequences of a group in one micro-batch are computed with their common beginning, the prompt at least, once: the same
    gradients for a fraction of the time where prompts are long beside answers. Not on a GPU in half precision, nor with
    sequence_parallel, load_balance_coefficient, experts of the engine, sliding windows or linear attention."""
    logprob_chunk_tokens: int = Field(4096, ge=1)
    """Logits are held for at most this many tokens at a time, and for fewer where they take more than 256 MiB on a CPU, 1.25
    GiB on a GPU, or half of what that has free."""
    fused_head: bool = True
    """On a GPU log-probs come from Triton kernels, which need a C compiler. false: from plain PyTorch, which moves six times
    as many bytes."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time for a fraction of the memory."""
    activation_offload: bool = False
    """Keep the checkpoints of activations in the host's memory until backward; needs activation_checkpointing. Slower, but
    the GPU then holds only those of one layer."""
    mlp_tiles: int = Field(1, ge=1)
    """Dense MLPs compute their tokens in this many slices, and again in backward: for long sequences, whose hidden values
    are the largest tensors of a layer. 1: all at once."""
    profile: bool = False
    """Log where the time of each batch goes, and write it to profile.jsonl and profile.md in the run's directory (see
    docs/evidence/performance.md). ``gspo learner --profile`` sets it. On a GPU the learner then waits for the device once
    per batch."""
    dump_tokens: bool = False
    """Keep what the learner computes for each token it trains on, and for each sequence, in learner-tokens/ in the run's
    directory, for ``gspo view``: log-probs, ratio, clipped or not, entropy; clip range and weight. About 21 bytes a token.
    Without it, ``gspo view`` gets the same numbers by replaying a batch."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of one rank's device in this dtype, in TFLOP/s. A profile reports the used share of it (MFU). Not set: known for
    some GPUs in bfloat16; otherwise a profile has no MFU."""
    checkpoint_every_batches: int = Field(10, ge=1)
    """Save a checkpoint after this many batches. A crash repeats at most this many, and those trained while one is being
    written."""
    checkpoint_in_background: bool = True
    """true: training waits only for a copy of the checkpoint's content, and continues while it is written. Until then each
    rank holds its share in CPU memory (12 bytes per parameter, over all ranks). false: no copy, and training waits until
    everything is on disk."""
    checkpoint_copy_gib: float = Field(1024.0, ge=0, le=2**20)
    """The most host memory, in GiB, that these copies take on one machine, all its ranks together. Training waits while the
    excess is written, parameter by parameter. 0: it waits until everything is written."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept; older ones are removed."""
    keep_best_checkpoint: bool = True
    """true: the checkpoint with the best weights (``evaluation.best_by``; of equal ones the earliest) is also kept. It takes
    the room of one more checkpoint, and of two more while one is evaluated. Only evaluated weights count, so let
    checkpoint_every_batches be a multiple of evaluation.every_batches. ``gspo export --checkpoint best`` writes it as a
    model. false: only the newest are kept."""
    weights_endpoint: str = "tcp://127.0.0.1:7003"
    """Rollouts fetch weights here; rank 0 binds it, and each other rank of a machine the next port, for its part of them."""
    advertised_weights_endpoint: str = ""
    """The address that rollouts connect to, if it differs from weights_endpoint, such as a service name. Empty: the same."""
    metrics_port: Port = 9102
    """/metrics, /healthz and /readyz, on each machine; 0: any free port (logged). Machines other than number 0 serve no
    metrics there, but report whether they are alive and train."""

    def stage_on(self, ranks: int, *, leaves_device: bool) -> int:
        """Return the ZeRO stage for so many ranks. One rank alone has nothing to partition: in float32 without offload,
        stage 1 then runs as stage 0, which gives the same weights without a second copy of them and of their gradients.

        ``leaves_device``: the states leave the device while the rollout has it, which needs those copies.
        """
        if self.zero_stage == 1 and ranks == 1 and self.dtype == "float32" and self.offload == "none" and not leaves_device:
            return 0
        return self.zero_stage

    @field_validator("adam_eps")
    @classmethod
    def _has_a_float32(cls, value: float) -> float:
        if value < LEAST_EPS:
            raise ValueError(
                f"learner.adam_eps is {value:g}: the square of a gradient below 1e-21 is 0 in float32, so that Adam would "
                f"divide it by this number alone, and the weight be lost; use {LEAST_EPS:g} or more, such as 1e-15"
            )
        return value

    @model_validator(mode="after")
    def _stage_fits(self) -> "Learner":
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "learner.dtype is 'bfloat16' but learner.zero_stage is 0, which computes Adam's first step wrongly; use "
                "zero_stage 1 or higher"
            )
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError(
                "learner.offload is 'optimizer' but learner.zero_stage is 0, which has nothing to offload; use "
                "zero_stage 1 or higher"
            )
        if self.offload == "optimizer_and_parameters" and self.zero_stage < 3:
            raise ValueError(
                f"learner.offload is 'optimizer_and_parameters' but learner.zero_stage is {self.zero_stage}, which keeps "
                "parameters whole; use zero_stage 3, or offload = optimizer"
            )
        return self

    @model_validator(mode="after")
    def _activations_are_kept(self) -> "Learner":
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError(
                "learner.activation_offload is true but learner.activation_checkpointing is false, so there are no "
                "checkpoints to keep; set activation_checkpointing = true"
            )
        return self

    @model_validator(mode="after")
    def _nodes_meet(self) -> "Learner":
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"learner.node_rank is {self.node_rank} of {self.num_nodes} machines: it counts from 0")
        host, _, port = self.rendezvous_address.rpartition(":")
        if self.num_nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"learner.rendezvous_address is {self.rendezvous_address!r} and learner.num_nodes is {self.num_nodes}: it "
                "must be HOST:PORT of machine 0, such as learner-0:29500"
            )
        return self


class LoraSection(Section):
    """Train low-rank adapters (LoRA) instead of all weights: see docs/guide/lora.md. Off by default.

    The model stays as it is. What is learnt is W + alpha / rank * B A, with small matrices A and B for each adapted weight.
    """

    rank: int = Field(0, ge=0)
    """Rank of A and B. 0: no adapters, all weights are trained. 8 to 64 is usual; the adapters' size grows with it."""
    alpha: float = Field(32.0, gt=0)
    """B A is scaled by alpha / rank, so that the same learning rate suits all ranks."""
    target_modules: list[LoraTarget] = Field(["attention"], min_length=1)
    """What is adapted. attention: the projections of queries, keys, values and outputs. mlp: those of dense MLPs. experts:
    those of a mixture's experts, each with matrices of its own. The router, norms and embeddings never are."""
    publish: Literal["merged", "adapter"] = "merged"
    """What a version consists of. merged: the model's weights with the adapters in them, which every engine can load.
    adapter: the adapters alone, which SGLang adds to the model that it was started with: a version is small, and no
    generation pauses. For target_modules = ["attention"] and servers of one rank; see docs/guide/lora.md."""
    max_loaded_loras: int = Field(3, ge=2, le=64)
    """With publish = "adapter": versions whose adapters a server holds at once. SGLang's --max-loras-per-batch is one more,
    for requests without an adapter. A version too many ends the generations of the oldest early, as retract does."""
    adapters: list[str] = Field([])
    """Train several adapters of one model in one run, each on its own tasks: their names. A version holds all of them, and
    rank and alpha are those of each. With publish = "adapter". Empty: one adapter, on all tasks."""
    adapter_field: str = ""
    """With adapters: the field of a task that names its adapter, such as "generator" of reasoning_gym, or a column among
    environment.options.task_columns; "a.b" is b inside a."""

    @field_validator("target_modules")
    @classmethod
    def _each_once(cls, targets: list[LoraTarget]) -> list[LoraTarget]:
        again = sorted({target for target in targets if targets.count(target) > 1})
        if again:
            raise ValueError(f"lora.target_modules names {', '.join(again)} more than once; name each once")
        return targets

    @model_validator(mode="after")
    def _several_have_names(self) -> "LoraSection":
        if not self.adapters and not self.adapter_field:
            return self
        odd = [name for name in self.adapters if not ADAPTER.fullmatch(name)]
        if odd or len(set(self.adapters)) < len(self.adapters) or not 2 <= len(self.adapters) <= MAX_ADAPTERS:
            raise ValueError(
                f"lora.adapters is {self.adapters!s:.200}: expected 2 to {MAX_ADAPTERS} names, each once, of 1 to "
                f"{MAX_ADAPTER_NAME} letters, digits, _, - and ., or none for one adapter"
            )
        if not self.adapter_field:
            raise ValueError(
                f"lora.adapters are {', '.join(self.adapters)} and lora.adapter_field is empty: name the field of a task "
                "that says whose it is"
            )
        if self.publish != "adapter":
            raise ValueError(
                f"lora.adapters are {', '.join(self.adapters)} and lora.publish is {self.publish!r}: merged weights would "
                'have one of them; use publish = "adapter"'
            )
        return self

    @model_validator(mode="after")
    def _can_be_published(self) -> "LoraSection":
        if self.publish == "merged":
            return self
        if not self.is_used:
            raise ValueError(
                'lora.publish is "adapter" and lora.rank is 0, so that there is none; set lora.rank, or publish = "merged"'
            )
        others = [target for target in self.target_modules if target != "attention"]
        if others:
            raise ValueError(
                f'lora.publish is "adapter" and lora.target_modules names {", ".join(others)}: only adapters of attention '
                'are published as such; use target_modules = ["attention"], or publish = "merged"'
            )
        return self

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.rank > 0

    @property
    def num_adapters(self) -> int:
        """How many adapters each adapted weight has."""
        return max(1, len(self.adapters))
