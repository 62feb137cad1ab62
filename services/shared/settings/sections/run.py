"""The sections about the run itself, which several processes read."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.learner import Learner, LoraSection
from gspo_services.shared.settings.sections.rollout import Rollout
from gspo_services.shared.settings.sections.section import FilePath, Section


class Run(Section):
    """The run as a whole."""

    directory: FilePath = Path("runs/default")
    """Everything that the run writes: ledger, checkpoints, metrics, logs, plots. The same directory resumes the run."""
    num_batches: int = Field(100, ge=1)
    """The run ends after this many batches."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds task order, sampling and the learner."""
    stop_without_signal_batches: int = Field(20, ge=0)
    """The run stops after this many batches in a row in which no answer had an advantage: nothing can be learned from them.
    It fails, unless all answers are right by then. Started again, it goes on for as many. 0: it never stops for this."""
    colocate: bool = False
    """For one GPU that holds the learner or the server, but not both: they time-share it. While the server has it, the
    learner keeps its states in the host's memory. The server loads the weights again from rollout.weights_directory each
    time. See docs/guide/colocate.md."""
    max_restarts: int = Field(5, ge=0)
    """``gspo run`` restarts a process that ends early. It gives up when one ends more often than this within 5 minutes."""
    log_bytes: int = Field(64 * 2**20, ge=2**16)
    """A log in the run's directory that exceeds this size is rotated: it becomes NAME.log.1, and so on."""
    log_files: int = Field(5, ge=2)
    """The largest number of files of a log, including the newest. The oldest is removed."""


class Model(Section):
    """The policy."""

    path: FilePath = Path("models/tiny")
    """Hugging Face model directory (config.json, *.safetensors, tokenizer.json), or its name on the hub, as in
    hf://Qwen/Qwen3-0.6B: the starting weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which weights are published and served."""
    float32_head: bool = False
    """The output embedding multiplies in float32 where all else is bfloat16, in the learner and in the SGLang servers that
    a rollout starts (their --enable-fp32-lm-head), so that no logit is rounded. See docs/guide/learner.md."""
    template_arguments: dict[str, Any] = Field({})
    """Variables of the chat template, such as { enable_thinking = false }, for environments and agents. An agent's call may
    replace them."""
    show_special_tokens: bool = False
    """Write the special tokens of an answer, such as <answer> or [THINK], into the text that environments, rewards and
    agents get. false: leave them out, as skip_special_tokens does. The token that ends a turn is never in the text."""


class EnvironmentSection(Section):
    """The source of tasks and rewards."""

    name: str = "arithmetic"
    """A built-in environment (`gspo environments` lists them: arithmetic, dataset, math, code and others), for agents also a
    built-in task set (rows, shop), or "package.module:ClassName"."""
    options: dict[str, Any] = Field({})
    """Options of the environment; see ``gspo environments``."""


class Sampling(Section):
    """How the policy is sampled. Recorded with every group, because the learner applies the same temperature. ``[schedule]``
    changes temperature and lengths within a run."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divides the logits, in the engine and in the learner. 0 is refused: greedy tokens have no behaviour log-prob."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1.0 can be trained on: with a truncated distribution the ratio of an unchanged policy differs from 1."""
    top_k: int = Field(-1, ge=-1)
    """Only -1 (off) can be trained on, for the same reason."""
    max_turn_tokens: int = Field(16, ge=1)
    """The most tokens of one action turn."""
    max_tokens: int = Field(256, ge=2)
    """The most tokens of a sequence, including prompt and observations."""
    max_episode_tokens: int | None = Field(None, ge=2)
    """The most tokens of an episode, over all its sequences, if agents make several; context counts in each. None:
    max_tokens."""

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
                "a turn must be shorter than the whole sequence"
            )
        if self.episode_tokens < self.max_tokens:
            raise ValueError(
                f"sampling.max_episode_tokens is {self.max_episode_tokens} and sampling.max_tokens is {self.max_tokens}: an "
                "episode has at least one sequence; give at least max_tokens"
            )
        return self

    @property
    def episode_tokens(self) -> int:
        return self.max_tokens if self.max_episode_tokens is None else self.max_episode_tokens


class BatchSection(Section):
    """The size of a batch, and how stale it may be."""

    group_size: int = Field(8, ge=2)
    """Trajectories per prompt. 1 is refused: a group of one has no baseline."""
    groups_per_batch: int = Field(32, ge=1)
    """Whole groups per batch. A batch starts from one policy version, and ends when the next one is published."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps per batch, each on groups_per_batch / mini_batches whole groups. The paper uses 4."""
    max_lag: int = Field(2, ge=0)
    """How old a trained token may be, in policy versions behind the learner: its staleness (prime-rl: max_off_policy_steps,
    AReaL: max_head_offpolicyness). 0: generation and training alternate."""

    @model_validator(mode="after")
    def _divisible(self) -> "BatchSection":
        if self.groups_per_batch % self.mini_batches:
            raise ValueError(
                f"batch.groups_per_batch is {self.groups_per_batch}, batch.mini_batches is {self.mini_batches}: every "
                "mini-batch holds whole groups, so the first must be a multiple of the second"
            )
        return self


def require_colocatable(learner: Learner, rollout: Rollout, lora: LoraSection) -> None:
    """What ``run.colocate`` needs: one learner and one server that can both leave the device. Raises: ValueError."""
    ranks = learner.num_ranks * learner.num_nodes
    if ranks > 1:
        _refuse(f"the learner has {ranks} ranks", "they would need a lock for each GPU; use learner.num_ranks = 1")
    if rollout.server_url:
        _refuse(
            f"rollout.server_url is {rollout.server_url}",
            "a server that somebody else starts takes the device without the lock; leave server_url out",
        )
    if rollout.num_servers != 1 or rollout.ranks_per_server != 1:
        _refuse(
            f"rollout.num_servers is {rollout.num_servers}, with {rollout.ranks_per_server} ranks each",
            "one server of one rank uses a GPU best; use rollout.num_servers = 1, tensor_parallel = 1 and data_parallel = 1",
        )
    if lora.publish == "adapter":
        _refuse(
            'lora.publish is "adapter"',
            'the engine would lose the model below the adapters each time it leaves the device; use publish = "merged"',
        )
    _require_movable(learner)


def _require_movable(learner: Learner) -> None:
    """DeepSpeed's ``offload_states`` exists in its optimizers of ZeRO 1 in float32 and of ZeRO 2."""
    stage = learner.zero_stage
    if stage == 2 or (stage == 1 and learner.dtype == "float32"):
        return
    reason = {
        0: "without ZeRO, DeepSpeed cannot move its optimizer's states",
        1: "in bfloat16, DeepSpeed's optimizer of ZeRO 1 cannot move its states",
        3: "DeepSpeed's optimizer of ZeRO 3 moves those of its own fused Adam only",
    }[stage]
    _refuse(
        f"learner.zero_stage is {stage} and learner.dtype {learner.dtype!r}",
        f"{reason}; use learner.zero_stage = 2, which takes the same memory on one GPU",
    )


def _refuse(found: str, way_out: str) -> None:
    raise ValueError(f"run.colocate is true and {found}: {way_out}; or set run.colocate = false")
