"""One run of the study as a value: everything that its numbers depend on, and an id that follows from it.

The id is a hash of the fields that differ from their defaults, so that a field added later does not change the ids of runs
that do not use it. Two questions with the same configuration share one run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gspo.settings import Anchor, RatioUnit, TisMode, require_number

TaskName = Literal["arithmetic", "countdown", "long-countdown", "mixed-countdown"]
ModelName = Literal["tiny", "deep"]
Clip = Literal["range", "none", "adaptive"]
Noise = Literal["none", "bf16", "fp8", "weights", "logprobs"]
Aggregation = Literal["sequence", "length"]
Lag = Literal["fixed", "uniform"]
Credit = Literal["answer", "number"]
Order = Literal["drawn", "dealt", "oldest_first"]
ReplayFrom = Literal["learner", "engine"]
ClipForm = Literal["given", "widen", "recentre", "matched", "shuffled", "total"]
StudySurrogate = Literal["clip", "m2po_clip", "vespo", "tempered"]

GENERATION = 1
"""Part of every id: raised when the meaning of a configuration changes, so that old results are not mistaken for new."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. Raises: ValueError for values that do not fit together."""

    task: TaskName
    seed: int
    num_batches: int
    model: ModelName = "tiny"
    """tiny: 2 layers of 8 experts; deep: 6 layers of 64 small experts, whose routers change their choice more easily."""
    group_size: int = 8
    num_sequences: int = 128
    """Trajectories in a batch."""
    num_mini_batches: int = 4
    """Optimizer steps in a batch."""
    learning_rate: float = 2e-4

    ratio_unit: RatioUnit = "sequence"
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    clip: Clip = "range"
    clip_target: float = 0.15
    """For clip "adaptive": the target clip fraction."""
    clip_range_growth: float = 0.0
    noise_z: float = 0.0
    anchor: Anchor = "behaviour"
    mismatch_mode: TisMode | Literal["truncate_by_lag"] = "off"
    mismatch_cap: float = 1.1
    mismatch_z: float = 2.0
    clip_form: ClipForm = "given"
    """given: by clip_range_growth and noise_z. total: eps_low and eps_high are nats of a whole answer, whatever its length.
    The others are measured by lag; benchmarks.study.clip_forms has them."""
    clip_cap: float | None = None
    """The product's ``clip_calibration_cap``: the most that "widen" widens a side for one token, in nats. None: no limit."""
    surrogate: StudySurrogate = "clip"
    """The product's, with token ratios; tempered: VESPO's kernel of W^power, with a power by lag and length
    (benchmarks.study.clip_forms)."""
    m2po_bound: float = 0.04
    routing_replay: bool = False
    """Training passes use the experts chosen by the weights of the batch's start (R2), or what ``replay_from`` says."""
    replay_from: ReplayFrom = "learner"
    """engine: the experts of the pass that the token was sampled from, in the sampler's precision and with its weights
    (R3); tokens that were not sampled choose theirs."""
    aggregation: Aggregation = "sequence"
    credit: Credit = "answer"
    """answer: every token has its answer's advantage; number: its number's, in a chain (benchmarks.study.tasks.credit)."""

    lag: int = 0
    """Batches by which the sampler's weights lag; the initial weights until that many batches exist."""
    lag_kind: Lag = "fixed"
    """"uniform": each group's lag is drawn from 0 .. ``lag``."""
    noise: Noise = "none"
    """The difference between sampler and learner besides lag."""
    noise_sigma: float = 0.0
    """"weights": relative deviation of each weight; "logprobs": nats, added to each reported log-prob."""

    order: Order = "drawn"
    """Of a batch's groups. drawn: that of their tasks, whatever their lags. The others are ``learner.plan.deal_in_turn`` as
    the service has it (dealt), and how a broker sends them (oldest_first)."""

    eval_every: int = 5
    num_eval_episodes: int = 128
    start_models: int = 3
    """How many start models the seeds share."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("task", self.task, get_args(TaskName)),
            ("model", self.model, get_args(ModelName)),
            ("clip", self.clip, get_args(Clip)),
            ("noise", self.noise, get_args(Noise)),
            ("aggregation", self.aggregation, get_args(Aggregation)),
            ("credit", self.credit, get_args(Credit)),
            ("lag_kind", self.lag_kind, get_args(Lag)),
            ("clip_form", self.clip_form, get_args(ClipForm)),
            ("order", self.order, get_args(Order)),
            ("surrogate", self.surrogate, get_args(StudySurrogate)),
            ("replay_from", self.replay_from, get_args(ReplayFrom)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        for name in ("num_batches", "group_size", "num_mini_batches", "eval_every", "num_eval_episodes", "start_models"):
            require_number(name, getattr(self, name), low=1)
        require_number("lag", self.lag, low=0)
        if self.num_sequences % (self.group_size * self.num_mini_batches):
            raise ValueError(
                f"num_sequences is {self.num_sequences}: give a multiple of group_size x num_mini_batches = "
                f"{self.group_size * self.num_mini_batches}, so that every mini-batch has the same number of whole groups"
            )
        if (self.noise_sigma > 0) != (self.noise in ("weights", "logprobs")):
            raise ValueError(f"noise is {self.noise!r} with noise_sigma {self.noise_sigma}; give both or neither")

        if self.credit == "number" and (self.task == "arithmetic" or self.aggregation != "sequence"):
            raise ValueError(
                f'credit is "number" with task {self.task!r}, aggregation {self.aggregation!r}; give a chain of numbers '
                "(countdown, long-countdown), and sequence"
            )
        if self.replay_from == "engine" and not self.routing_replay:
            raise ValueError("replay_from is 'engine' with routing_replay False, which replays nothing; give True")
        if self.clip_cap is not None and not (self.clip_cap > 0 and self.clip_form == "widen"):
            raise ValueError(f"clip_cap is {self.clip_cap} with clip_form {self.clip_form!r}; give one above 0, with widen")
        kernel = self.surrogate in ("vespo", "tempered")
        if self.surrogate != "clip" and (
            self.ratio_unit != "token" or self.anchor != "behaviour" or kernel != (self.clip == "none")
        ):
            raise ValueError(
                f"surrogate is {self.surrogate!r} with ratio_unit {self.ratio_unit!r}, anchor {self.anchor!r}, clip "
                f"{self.clip!r}; give token, behaviour, and {'none' if kernel else 'range'}"
            )
        if self.clip_form != "given" and (self.anchor != "behaviour" or self.clip != "range"):
            raise ValueError(
                f"clip_form is {self.clip_form!r} with anchor {self.anchor!r}, clip {self.clip!r}; give behaviour, range"
            )

    @property
    def num_groups(self) -> int:
        return self.num_sequences // self.group_size

    @property
    def start_number(self) -> int:
        """The seed of the run's start model."""
        return self.seed % self.start_models

    @property
    def start_name(self) -> str:
        """Task, model and seed of the start model."""
        return f"{self.task}-{self.model}-{self.start_number}"

    @property
    def run_id(self) -> str:
        """The task and 12 hexadecimal digits."""
        return f"{self.task}-{_digest(_told(self))}"

    def as_dict(self) -> dict[str, Any]:
        """Every field, for a record."""
        return asdict(self)


def _told(config: RunConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and always the required ones."""
    values = asdict(config)
    return {field.name: values[field.name] for field in fields(config) if values[field.name] != field.default}


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps({"generation": GENERATION, **values}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
