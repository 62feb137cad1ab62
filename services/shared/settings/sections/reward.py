"""The section of the processes that compute rewards."""

import re
from typing import Final, Literal

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.section import Section

_OURS: Final = ("GSPO_SCRATCH", "GSPO_USER_PROCESS", "TMPDIR")


class RewardSection(Section):
    """Code that computes rewards: worker processes beside each rollout, which can be killed. See
    docs/guide/rewards.md."""

    workers: int = Field(1, ge=1, le=256)
    """Worker processes of each rollout; each computes one reward at a time. A reward that computes needs a core. One that
    waits for a judge needs no core, but one worker (about 100 MB) for each request under way."""
    memory_bytes: int = Field(6 * 2**30, ge=128 * 2**20)
    """Address space of one worker, libraries included: a build of torch for CUDA with transformers takes 3.4 GiB. Code that
    needs more gets a MemoryError, and the attempt fails."""
    cpu_s: int = Field(60, ge=1)
    """CPU seconds of one reward, for each of its processes. The deadline, in wall-clock seconds, is the environment's:
    environment.options.reward_deadline_s for the dataset environment."""
    on_deadline: Literal["fail", "zero"] = "fail"
    """The result of a reward function over its deadline or its CPU time. fail: there is no reward; the attempt fails and
    is repeated. Right if the grader is to blame, such as a slow judge. zero: 0, for functions that run the policy's code.
    Leaving out every attempt that hangs would teach nothing about hanging, and would favour code that ends early. All
    rollouts of a run must have the same value."""
    network: bool = False
    """Let reward code reach the network, for judges and other services. Then nothing limits what it may reach."""
    scratch: bool = False
    """Let reward code write files, of at most 256 MiB each. Each job has a folder of its own, as TMPDIR and GSPO_SCRATCH,
    which is removed after it. Without it no file can grow. The limit is on sizes, not on places."""
    model: str = ""
    """The directory of a reward model: a sequence classifier of transformers with one output, which scores each episode's
    conversation. Its logit is the component "model", and is added to what the environment itself gives. One process on each
    machine serves all rollouts of the run. "": there is none."""
    model_weight: float = 1.0
    """What the logit counts in the sum."""
    model_device: str = "cpu"
    """"cpu", or "cuda:N": GPU N of the machine, counted as nvidia-smi does. `gspo run` gives that GPU to nobody else, unless
    it is the only one."""
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The numbers in which it computes, the same in all rollouts of a run. auto: those of its files."""
    model_input: Literal["chat", "text", "pair"] = "chat"
    """What it reads. chat: the conversation in its own chat template. text: the messages' texts, the answer right after the
    last. pair: prompt and answer as two texts, for encoders that were trained so."""
    model_max_tokens: int = Field(0, ge=0)
    """The longest conversation that it reads, in its own tokens. 0: as long as the model takes."""
    model_too_long: Literal["fail", "truncate"] = "fail"
    """A longer conversation. fail: no reward, the attempt fails. truncate: the beginning is scored, and counted as the
    failure "truncated"."""
    model_batch_tokens: int = Field(16_384, ge=1)
    """Tokens of one batch, padding included. A longer conversation is a batch of its own."""
    model_deadline_s: float = Field(300.0, gt=0)
    """Seconds for one score: the wait behind others, and perhaps the start of a new process."""
    group: str = ""
    """A function "package.module:function" of (completions, task), and of rewards if it has that parameter: it compares all
    answers of a group, and returns a list with the reward of each. These are trained on, in place of what each answer was
    worth alone. "": each answer is graded alone. Evaluations always grade alone."""
    group_deadline_s: float = Field(60.0, gt=0, le=3600)
    """Wall-clock seconds for one call of reward.group. A call that takes longer is a failed attempt."""
    group_weights: dict[str, float] | None = None
    """What each named component of reward.group counts; each must be there. Left out: the sum of all."""
    variables: list[str] = Field([])
    """Names of the rollout's environment variables that reward code gets, such as ["OPENAI_API_KEY"]. It gets no others,
    except eleven that an interpreter needs. The values stay out of configuration, logs and ledger."""

    @model_validator(mode="after")
    def _model_has_a_device(self) -> "RewardSection":
        if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", self.model_device):
            raise ValueError(
                f'reward.model_device is {self.model_device[:100]!r}: expected "cpu", or a GPU such as "cuda:0"'
            )
        return self

    @model_validator(mode="after")
    def _group_can_be_called(self) -> "RewardSection":
        if self.group and not re.fullmatch(r"[\w.]+:\w+", self.group):
            raise ValueError(f'reward.group is {self.group[:100]!r}: expected "package.module:function"')
        if self.group_weights is not None and not (self.group and self.group_weights):
            raise ValueError(
                f"reward.group_weights is {self.group_weights}: it names the components of reward.group, at least one; "
                "leave it out, or set reward.group"
            )
        return self

    @model_validator(mode="after")
    def _variables_are_names(self) -> "RewardSection":
        for name in self.variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"reward.variables holds {name[:100]!r}: give names of variables only, like OPENAI_API_KEY")
            if name in _OURS:
                raise ValueError(f"reward.variables holds {name!r}, for which each worker gets a separate value: remove it")
        return self
