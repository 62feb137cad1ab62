"""One TOML file configures a whole run; each process reads the sections it needs.

Precedence: file < environment (``GSPO_BATCH__MAX_LAG=2``) < command line (``--set batch.max_lag=2``).
Unknown keys are errors.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.runtime.settings.exposure import EVERY_ADDRESS, EXPOSED, is_private
from services.runtime.settings.objective import objective_of

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    """The run as a whole."""

    directory: Path = Path("runs/default")
    """Everything the run writes: ledger, checkpoints, metrics, logs, plots. The same directory again resumes the run."""
    num_batches: int = Field(100, ge=1)
    """The run ends after this many batches."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds task order, sampling and the learner."""
    max_restarts: int = Field(5, ge=0)
    """`gspo run` starts a process that ended again, but gives up when one ends more often than this within 5 minutes."""


class Model(Section):
    """The policy."""

    path: Path = Path("models/tiny")
    """Hugging Face model directory (config.json, *.safetensors, tokenizer.json): the starting weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the weights are published and served."""


class EnvironmentSection(Section):
    """Where tasks and rewards come from."""

    name: str = "arithmetic"
    """A built-in environment (arithmetic, calculator, dataset) or "package.module:ClassName"."""
    options: dict[str, Any] = {}
    """Passed to the environment; see `gspo environments`."""


class Sampling(Section):
    """How the policy is sampled. Recorded with every batch, because the learner applies the same temperature."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divides the logits, in the engine and in the learner. 0 is refused: greedy tokens have no behaviour log-prob."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1.0 can be trained on: a truncated distribution makes the ratio of an unchanged policy differ from 1."""
    top_k: int = Field(-1, ge=-1)
    """Only -1 (off) can be trained on, for the same reason."""
    max_turn_tokens: int = Field(16, ge=1)
    """Most tokens of one action turn."""
    max_tokens: int = Field(256, ge=2)
    """Most tokens of a whole trajectory, prompt and observations included."""

    @model_validator(mode="after")
    def _trainable(self) -> "Sampling":
        if self.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy tokens cannot be trained on; use a value such as 1.0")
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"sampling.top_p is {self.top_p} and sampling.top_k is {self.top_k}: log-probs of a truncated distribution "
                "give a ratio other than 1 for an unchanged policy; use top_p = 1.0 and top_k = -1"
            )
        if self.max_turn_tokens >= self.max_tokens:
            raise ValueError(
                f"sampling.max_turn_tokens is {self.max_turn_tokens} and sampling.max_tokens is {self.max_tokens}: "
                "a turn must be shorter than the whole trajectory"
            )
        return self


class BatchSection(Section):
    """What makes a batch, and how stale it may be."""

    group_size: int = Field(8, ge=2)
    """Trajectories per prompt. 1 is refused: a group of one has no baseline."""
    groups_per_batch: int = Field(32, ge=1)
    """Whole groups per batch; a batch is trained under one policy version and ends with a publication."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps per batch, each on groups_per_batch / mini_batches whole groups. The paper uses 4."""
    max_lag: int = Field(2, ge=0)
    """No token older than this many versions is trained on. 0: generation and training take turns."""

    @model_validator(mode="after")
    def _divisible(self) -> "BatchSection":
        if self.groups_per_batch % self.mini_batches:
            raise ValueError(
                f"batch.groups_per_batch is {self.groups_per_batch}, batch.mini_batches is {self.mini_batches}: every "
                "mini-batch holds whole groups, so the first must be a multiple of the second"
            )
        return self


class ObjectiveSection(Section):
    """GSPO-token with staleness-aware sequence clipping; see docs/design.md for the formulas."""

    ratio_unit: Literal["sequence", "turn", "token"] = "sequence"
    """Tokens that share one importance ratio: sequence (GSPO), turn, or token (GRPO)."""
    eps_low: float = Field(3e-4, gt=0, lt=1)
    """Lower clip at lag 0: ratios below 1 - eps_low are clipped. The paper: 3e-4 (GRPO 0.2)."""
    eps_high: float = Field(4e-4, gt=0)
    """Upper clip at lag 0: ratios above 1 + eps_high are clipped. The paper: 4e-4 (GRPO 0.27)."""
    clip_range_growth: float = 1.0
    """c: the band of a sequence of lag d is (1 + c d) times as wide, or, for a negative c, 1 / (1 + |c| d) times. 0: a fixed
    band."""
    noise_z: float = Field(1.0, ge=0)
    """z: the band is widened by z * sigma / sqrt(n), sigma being the measured engine-learner mismatch. 0: no noise floor."""
    anchor: Literal["behaviour", "proximal"] = "proximal"
    """What the ratio is taken against: the learner's own log-probs at the start of the batch (one more forward pass; the
    engine mismatch is then handled by mismatch_mode and the clip sees the batch's own updates alone), or the engine's.
    docs/evidence/study.md says why the first is the default."""
    mismatch_mode: Literal["off", "truncate", "reject"] = "truncate"
    """With anchor = "proximal": what is done with a sequence's mismatch factor beyond mismatch_cap."""
    mismatch_cap: float = Field(1.1, gt=1)
    """Largest mismatch factor (and 1 / smallest, when rejecting). It bounds the exponential of a mean per token, so it lies
    near 1 for long sequences; for answers of a few tokens take a larger one."""
    adaptive_clip_target: float | None = Field(None, gt=0, lt=1)
    """After each batch the band is widened or narrowed so that the clipped share of the sequences that have an advantage
    comes to this (in the paper, of all: 0.15). Above some 0.4 nothing can reach it: half have the other sign.
    The factor is the metric clip_scale, and goes on after a restart. Not set: the width is that of the keys above."""
    routing_replay: bool = False
    """Mixture of experts only: all mini-batches use the experts that the weights at the batch's start choose (the paper's
    Routing Replay, which GRPO needs and GSPO does not). One more forward pass with anchor = "behaviour"; without effect
    where mini_batches is 1."""
    advantage: Literal["sequence", "turn"] = "sequence"
    """Group-relative advantage of the whole trajectory, or per turn from the rewards that follow it."""
    normalise_by_std: bool = True
    """Divide group-relative advantages by the group's standard deviation, as the paper does."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ObjectiveSection":
        try:
            objective_of(self)
        except ValueError as error:
            raise ValueError(f"objective.{error}") from error
        return self


class Evaluation(Section):
    """Held-out problems, sampled as in training, never trained on."""

    every_batches: int = Field(5, ge=0)
    """Evaluate the newest version every so many batches, and at the start and end. 0: never."""
    num_tasks: int = Field(64, ge=1)
    """Held-out tasks per evaluation, the same each time."""


class Broker(Section):
    """The durable queue between rollouts and learner."""

    work_endpoint: str = "tcp://127.0.0.1:7001"
    """Rollouts connect here; the broker binds it."""
    batch_endpoint: str = "tcp://127.0.0.1:7002"
    """The learner and `gspo run` connect here; the broker binds it."""
    lease_s: PositiveSeconds = 15.0
    """A lease that is not renewed for so long ends; its trajectory goes on elsewhere from the last acknowledged token."""
    max_attempts: int = Field(4, ge=1)
    """A trajectory that failed (not: was handed back or lost) so often is dropped with its group, and reported."""
    commit_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.005
    """Group commit: how long messages are gathered before one commit and its acknowledgements."""
    failure_budget: int = Field(20, ge=1)
    """The run stops with the reason after so many groups in a row were dropped because they failed."""
    metrics_port: Port = 9101
    """/metrics, /healthz and /readyz; 0: any free port (logged)."""


class Rollout(Section):
    """SGLang servers and the agent loops in front of them."""

    num_servers: int = Field(2, ge=0)
    """How many rollouts `gspo run` starts on this machine. Others may join at any time."""
    server_url: str = ""
    """Use the SGLang server that already runs here instead of starting one (it must see weights_directory)."""
    server_port: Port = 0
    """Port of the SGLang server; 0: any free one."""
    server_args: list[str] = []
    """More arguments for sglang.launch_server."""
    max_total_tokens: int = Field(65536, ge=256)
    """Size of SGLang's KV cache, in tokens (CPU)."""
    max_running: int = Field(64, ge=1)
    """Episodes in flight per server."""
    chunk_tokens: int = Field(64, ge=1, le=1024)
    """Stream a chunk to the broker after so many new tokens (and at the end of each turn): what a crash can cost."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """How unfinished generations wait for a weight update. retract: their KV cache is computed again under the new weights,
    so that each token's log-prob is that of one policy. in_place: faster, later tokens see the old cache."""
    weights_directory: Path = Path("/dev/shm")
    """Fetched weights are written below this directory (a memory file system) for SGLang to load."""
    weights_path: Literal["chunks", "group"] = "chunks"
    """How weights reach the engine. chunks: fetched, checked, and loaded from rollout.weights_directory. group: the learner
    sends every version whole into a process group with the engine (learner.weights_group_backend must be set); chunks where
    that fails. See docs/guide/weights.md."""
    peer_weights_endpoint: str = ""
    """Fetch weights from other rollouts, too, and serve them here, so that the learner sends each version to a few rollouts
    however many there are. An address of this host that the others reach, such as "tcp://10.0.3.7:7004"; port * is any free
    one. Empty: the learner serves everybody. With security.keys every rollout needs the others' public keys."""
    start_timeout_s: PositiveSeconds = 600.0
    """SGLang must be healthy within this time."""
    engine_timeout_s: PositiveSeconds = 300.0
    """A generation to which SGLang adds nothing for so long (waiting for a weight update included), or a weight update that
    takes longer, is given up, and its trajectories go on elsewhere. The rollout of a server that hangs ends after three such
    times, or when three weight updates in a row have failed."""
    drain_s: PositiveSeconds = 10.0
    """On SIGTERM: time to hand unfinished trajectories back."""
    linger: bool = False
    """When the run is complete: false ends the process with status 0; true ends SGLang alone, and the process waits for
    SIGTERM, alive and not ready. For what starts again whatever ends, such as a Deployment; `gspo run` sets false."""
    reward_workers: int = Field(1, ge=1)
    """Killable worker processes for slow rewards (math-verify)."""
    metrics_port: Port = 9110
    """First rollout's port; `gspo run` gives the following ones port + 1, + 2, ... 0: any free port."""


class Learner(Section):
    """DeepSpeed."""

    num_ranks: int = Field(1, ge=1)
    """Processes that `gspo learner` starts on this machine (gloo on CPU, nccl on GPU)."""
    num_nodes: int = Field(1, ge=1)
    """Machines that train together; `gspo learner` runs on each, and each has num_ranks processes."""
    node_rank: int = Field(0, ge=0)
    """This machine's number, `--set learner.node_rank=1`. Number 0 talks to the broker and serves the weights."""
    meeting_address: str = ""
    """HOST:PORT of machine 0, where the ranks of several machines find each other; rank 0 opens it."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed ZeRO stage."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share a mixture's experts between them (DeepSpeed's AutoEP); it divides num_ranks and the number of
    experts. 1: every rank has all experts, partitioned by ZeRO alone. See docs/guide/learner.md."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """What is kept in the host's memory and not the GPU's. "optimizer": masters and Adam's moments, where Adam then steps;
    needs zero_stage >= 1. "optimizer_and_parameters": the weights too, fetched by layers; needs zero_stage 3. Slower."""
    collective_timeout_s: float = Field(1800.0, ge=1)
    """The ranks wait for a missing one so long, then end with an error. One that dies is noticed at once, on CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass; master weights are float32."""
    learning_rate: float = Field(1e-6, gt=0)
    """Constant after warmup_steps."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warmup."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    token_budget: int = Field(4096, ge=16)
    """Most tokens of a packed micro-batch."""
    logprob_chunk_tokens: int = Field(512, ge=1)
    """Logits are held for at most so many tokens at a time; of a very large vocabulary, for fewer (256 MiB)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    profile: bool = False
    """Log where the time of each batch goes, and write it to profile.jsonl and profile.md in the run's directory (see
    docs/evidence/performance.md). `gspo learner --profile` sets it. On a GPU the learner then waits for the device once a
    batch."""
    peak_tflops: float | None = Field(None, gt=0)
    """What one rank's device can do at most, in TFLOP/s of this dtype: a profile says the share of it that was used (MFU).
    Not set: known for some GPUs in bfloat16, otherwise not said."""
    checkpoint_every_batches: int = Field(10, ge=1)
    """A crash repeats at most so many batches."""
    checkpoint_in_background: bool = True
    """Training waits for a copy of what a checkpoint holds, and goes on while it is written; until then each rank holds its
    share in CPU memory (12 bytes for each parameter, over all ranks), and rank 0 all weights besides. False: no copy, and
    training waits until everything is on disk."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are removed."""
    weights_endpoint: str = "tcp://127.0.0.1:7003"
    """Rollouts fetch weights here; the learner binds it."""
    weights_group_backend: Literal["", "gloo", "nccl"] = ""
    """Also send weights into process groups of the learner and one engine, for rollouts whose rollout.weights_path is
    "group": nccl where the engines' GPUs reach the learner's, gloo between CPUs. Neither encrypted nor authenticated, on
    ports of torch's own choice. Empty: chunks only. See docs/guide/weights.md."""
    advertised_weights_endpoint: str = ""
    """What rollouts connect to when it differs from weights_endpoint (a service name); empty: the same."""
    metrics_port: Port = 9102
    """/metrics, /healthz and /readyz; 0: any free port (logged). On each machine: the others than number 0 have no metrics
    there, but say whether they live and train."""

    @model_validator(mode="after")
    def _nodes_meet(self) -> "Learner":
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"learner.node_rank is {self.node_rank} of {self.num_nodes} machines: it counts from 0")
        host, _, port = self.meeting_address.rpartition(":")
        if self.num_nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"learner.meeting_address is {self.meeting_address!r} and learner.num_nodes is {self.num_nodes}: it must be "
                "HOST:PORT of machine 0, such as learner-0:29500"
            )
        return self


class SecuritySection(Section):
    """Who may join the run; see docs/guide/security.md."""

    keys: str = ""
    """Directory of this process's secret key and everybody's public keys; `gspo keys DIRECTORY` makes one. Every socket is
    then encrypted, and only listed keys are admitted. Empty: no keys, and every endpoint must be this host's own."""
    allow_plaintext: bool = False
    """Without keys, use endpoints that other hosts reach: whoever reaches them can join the run, and read it."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics, /healthz and /readyz are bound to. 127.0.0.1: this host alone. 0.0.0.0: every interface, as
    Kubernetes's probes and Prometheus need. They are read-only, and neither encrypted nor authenticated."""


class Settings(BaseModel):
    """All sections of a run's configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: Run = Run()
    model: Model = Model()
    environment: EnvironmentSection = EnvironmentSection()
    sampling: Sampling = Sampling()
    batch: BatchSection = BatchSection()
    objective: ObjectiveSection = ObjectiveSection()
    evaluation: Evaluation = Evaluation()
    broker: Broker = Broker()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    security: SecuritySection = SecuritySection()

    @model_validator(mode="after")
    def _trajectory_fits_cache(self) -> "Settings":
        if self.rollout.max_total_tokens < self.sampling.max_tokens:
            raise ValueError(
                f"rollout.max_total_tokens is {self.rollout.max_total_tokens} and sampling.max_tokens is "
                f"{self.sampling.max_tokens}: a server could not hold one trajectory; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_be_reached(self) -> "Settings":
        endpoint = self.learner.weights_endpoint
        if not self.learner.advertised_weights_endpoint and endpoint.startswith(EVERY_ADDRESS):
            raise ValueError(
                f"learner.weights_endpoint is {endpoint!r}, which binds every address but tells rollouts none; set "
                "learner.advertised_weights_endpoint to what they connect to, such as tcp://learner:7003"
            )
        own = self.rollout.peer_weights_endpoint
        if own.startswith(EVERY_ADDRESS):
            raise ValueError(
                f"rollout.peer_weights_endpoint is {own!r}, which binds every address but tells other rollouts none; set it "
                "to this host's own, such as tcp://10.0.3.7:7004"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_plaintext(self) -> "Settings":
        if self.learner.weights_group_backend and not self.security.allow_plaintext:
            raise ValueError(
                f"learner.weights_group_backend is {self.learner.weights_group_backend!r}: process groups are neither "
                "encrypted nor authenticated, with keys or without; set security.allow_plaintext = true where only the "
                "run's own machines reach each other, or leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _plaintext_stays_on_this_host(self) -> "Settings":
        if self.security.keys or self.security.allow_plaintext:
            return self
        endpoints = {
            "broker.work_endpoint": self.broker.work_endpoint,
            "broker.batch_endpoint": self.broker.batch_endpoint,
            "learner.weights_endpoint": self.learner.weights_endpoint,
            "learner.advertised_weights_endpoint": self.learner.advertised_weights_endpoint,
            "rollout.peer_weights_endpoint": self.rollout.peer_weights_endpoint,
        }
        exposed = [f"{key} is {endpoint!r}" for key, endpoint in endpoints.items() if not is_private(endpoint)]
        if exposed:
            raise ValueError(f"{', '.join(exposed)}: {EXPOSED}")
        return self
