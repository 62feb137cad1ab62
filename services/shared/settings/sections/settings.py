"""All sections together, and the checks that concern more than one."""

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from gspo_protocol.endpoints import require_endpoint
from gspo_services.shared.settings.exposure import EVERY_ADDRESS, EXPOSED, is_private
from gspo_services.shared.settings.sections.agent import AgentSection
from gspo_services.shared.settings.sections.broker import Broker
from gspo_services.shared.settings.sections.data import DataSection
from gspo_services.shared.settings.sections.distillation import DistillationSection
from gspo_services.shared.settings.sections.evaluation import Evaluation, EvaluationSet
from gspo_services.shared.settings.sections.learner import Learner, LoraSection
from gspo_services.shared.settings.sections.objective import ObjectiveSettings
from gspo_services.shared.settings.sections.reward import RewardSection
from gspo_services.shared.settings.sections.rollout import Rollout
from gspo_services.shared.settings.sections.run import (
    BatchSection,
    EnvironmentSection,
    Model,
    Run,
    Sampling,
    require_colocatable,
)
from gspo_services.shared.settings.sections.sandbox import SandboxSection
from gspo_services.shared.settings.sections.schedule import (
    Scheduled,
    ScheduleSection,
    critical_batches,
    curves,
    require_schedules,
)
from gspo_services.shared.settings.sections.security import SecuritySection
from gspo_services.shared.settings.sections.serve import ServeSection
from gspo_services.shared.settings.sections.trackers import TrackersSection


class Settings(BaseModel):
    """All sections of a run's configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: Run = Run()
    model: Model = Model()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    agent: AgentSection = AgentSection()
    sandbox: SandboxSection = SandboxSection()
    sampling: Sampling = Sampling()
    schedule: ScheduleSection = ScheduleSection()
    batch: BatchSection = BatchSection()
    data: DataSection = DataSection()
    objective: ObjectiveSettings = ObjectiveSettings()
    distillation: DistillationSection = DistillationSection()
    evaluation: Evaluation = Evaluation()
    broker: Broker = Broker()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    lora: LoraSection = LoraSection()
    security: SecuritySection = SecuritySection()
    trackers: TrackersSection = TrackersSection()
    serve: ServeSection = ServeSection()

    _folder: str = PrivateAttr("")
    _told_paths: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def folder(self) -> str:
        """Where the relative paths of the configuration file start; empty: the working directory."""
        return self._folder

    @property
    def told_paths(self) -> dict[str, str]:
        """By path of these settings, what the configuration file says: it starts at ``folder``."""
        return self._told_paths

    def read_in(self, folder: str, told_paths: dict[str, str]) -> "Settings":
        """Return these settings as those of a configuration file in ``folder``."""
        own = self.model_copy()
        own._folder, own._told_paths = folder, told_paths
        return own

    def for_set(self, chosen: EvaluationSet) -> "Settings":
        """Return these settings with the environment and the sampling of an evaluation set. Its sampling may be one that
        cannot be trained on."""
        name = chosen.environment or self.environment.name
        own = name == self.environment.name
        options = {**(self.environment.options if own else {}), **chosen.options}
        keys = ("temperature", "top_p", "top_k", "max_turn_tokens", "max_tokens")
        changed = {key: value for key in keys if (value := getattr(chosen, key)) is not None}
        if "max_tokens" in changed:
            changed["max_episode_tokens"] = max(self.sampling.max_episode_tokens or 0, changed["max_tokens"])
        return self.model_copy(
            update={
                "environment": self.environment.model_copy(update={"name": name, "options": options}),
                "sampling": self.sampling.model_copy(update=changed),
            }
        )

    @model_validator(mode="after")
    def _sets_fit_cache(self) -> "Settings":
        for name, each in self.evaluation.sets.items():
            sampling = self.for_set(each).sampling
            if sampling.max_turn_tokens >= sampling.max_tokens:
                raise ValueError(
                    f"evaluation.sets.{name}: max_turn_tokens is {sampling.max_turn_tokens} and max_tokens is "
                    f"{sampling.max_tokens}, with those of [sampling] where the set has none: a turn must be shorter than "
                    "the whole sequence"
                )
            if self.agent.is_used and self.agent.advertised_url and self.evaluation.interval(each):
                raise ValueError(
                    f"agent.advertised_url is {self.agent.advertised_url!r} but evaluation.sets.{name} is evaluated in the "
                    "run: its agents need a separate endpoint; set every_batches = 0 there and use `gspo eval`"
                )
            if self.rollout.max_total_tokens < sampling.max_tokens:
                raise ValueError(
                    f"rollout.max_total_tokens is {self.rollout.max_total_tokens} but evaluation.sets.{name}.max_tokens is "
                    f"{sampling.max_tokens}: a server could not hold one trajectory; raise the first or lower the second"
                )
        return self

    @property
    def largest_sampling(self) -> Sampling:
        """Return the section sampling with each limit at its largest of all batches."""
        if not curves(self):
            return self.sampling
        batches = [Scheduled.of(self, batch) for batch in critical_batches(self)]
        largest = {name: max(getattr(each, name) for each in batches) for name in ("max_turn_tokens", "max_tokens")}
        return self.sampling.model_copy(update=largest)

    @property
    def longest_sequence(self) -> int:
        """Return the most tokens of a sequence that the run asks for, in all batches and its evaluation sets."""
        sets = [self.for_set(each).sampling for each in self.evaluation.in_runs().values()]
        return max(each.max_tokens for each in (self.largest_sampling, *sets))

    @model_validator(mode="after")
    def _schedules_hold(self) -> "Settings":
        require_schedules(self)
        return self

    @model_validator(mode="after")
    def _computers_fit_sandboxes(self) -> "Settings":
        most, asked = self.sandbox.max_memory_bytes, self.agent.computer_memory_bytes
        if self.agent.computer and asked > most:
            raise ValueError(
                f"agent.computer_memory_bytes is {asked} and sandbox.max_memory_bytes is {most}: no command would be run; "
                "lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _trajectory_fits_cache(self) -> "Settings":
        most = self.largest_sampling.max_tokens
        if self.rollout.max_total_tokens < most:
            raise ValueError(
                f"rollout.max_total_tokens is {self.rollout.max_total_tokens} but sampling.max_tokens is "
                f"{most}: a server could not hold one trajectory; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _trajectories_can_be_overlong(self) -> "Settings":
        limit = self.largest_sampling.max_tokens
        for name in ("overlong_filter_tokens", "overlong_buffer_tokens"):
            tokens = getattr(self.objective, name)
            if tokens is not None and tokens > limit:
                raise ValueError(
                    f"objective.{name} is {tokens} but sampling.max_tokens is {limit}: no trajectory has that many tokens; "
                    "lower the first or raise the second"
                )
        return self

    @model_validator(mode="after")
    def _rewards_are_known_before_a_batch(self) -> "Settings":
        if self.data.dynamic_sampling:
            said, consequence, key = "data.dynamic_sampling is true", "none may be filtered out", "dynamic_sampling"
        elif self.data.rest_after_groups:
            said, key = f"data.rest_after_groups is {self.data.rest_after_groups}", "rest_after_groups"
            consequence = "their tasks may not rest"
        else:
            return self
        if self.objective.kl_coefficient > 0 and self.objective.kl_in == "reward":
            raise ValueError(
                f'{said} and objective.kl_in is "reward": the learner then changes every reward, so that groups with equal '
                f'rewards have an advantage too, and {consequence}; leave {key} out, or set kl_in = "loss"'
            )
        if self.distillation.teacher:
            raise ValueError(
                f"{said} and distillation.teacher is {self.distillation.teacher!r}: groups with equal rewards have an "
                f"advantage, too, and {consequence}; leave {key} out"
            )
        return self

    @model_validator(mode="after")
    def _a_server_can_teach(self) -> "Settings":
        url = self.distillation.url
        batches = critical_batches(self) if url and curves(self) else [0]
        others = [value for at in batches if (value := Scheduled.of(self, at).temperature) != 1]
        if url and others:
            raise ValueError(
                f"distillation.teacher is {url!r} and sampling.temperature is {others[0]:g}: a server scores at "
                "temperature 1; sample at 1, or let the teacher be a directory"
            )
        if url and self.learner.sequence_parallel > 1:
            raise ValueError(
                f"distillation.teacher is {url!r} and learner.sequence_parallel is {self.learner.sequence_parallel}: ranks "
                "that share a sequence would each ask for it; use sequence_parallel = 1, or let the teacher be a directory"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_generations(self) -> "Settings":
        if self.broker.idle_lease_s <= self.rollout.engine_timeout_s:
            raise ValueError(
                f"broker.idle_lease_s is {self.broker.idle_lease_s:g} but rollout.engine_timeout_s is "
                f"{self.rollout.engine_timeout_s:g}: its lease would end while a rollout still waits for the engine; "
                "raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_agents(self) -> "Settings":
        if self.agent.is_used and self.broker.idle_lease_s <= self.agent.deadline_s:
            raise ValueError(
                f"broker.idle_lease_s is {self.broker.idle_lease_s:g} but agent.deadline_s is {self.agent.deadline_s:g}: an "
                "episode's lease would end while its agent still works; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _reward_model_has_environments(self) -> "Settings":
        if self.agent.is_used and self.reward.model:
            raise ValueError(
                f"reward.model is {self.reward.model!r} and an agent plays, which returns its reward itself: leave the "
                "model out, and let the agent ask a service that serves the model"
            )
        return self

    @model_validator(mode="after")
    def _roles_have_rewards(self) -> "Settings":
        if self.objective.advantage == "role" and not self.agent.roles:
            raise ValueError(
                "objective.advantage is 'role' and agent.roles is empty: name the roles that the policy plays, or use "
                "another advantage"
            )
        if self.agent.roles and self.reward.group:
            raise ValueError(
                f"reward.group is {self.reward.group!r} and agent.roles are {len(self.agent.roles)}: it gives an episode "
                "one reward in place of those of its roles; remove one"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_graded(self) -> "Settings":
        graded_alone = self.environment.options.get("graded_alone", True)
        if not self.reward.group and str(graded_alone).lower() == "false":
            raise ValueError(
                "environment.options.graded_alone is false and reward.group is not set: every reward would be 0; name the "
                "function that compares answers, or leave graded_alone out"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_comparisons(self) -> "Settings":
        if self.reward.group and self.broker.idle_lease_s <= self.reward.group_deadline_s:
            raise ValueError(
                f"broker.idle_lease_s is {self.broker.idle_lease_s:g} but reward.group_deadline_s is "
                f"{self.reward.group_deadline_s:g}: a group's lease would end while reward.group still compares it; raise "
                "the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _agents_stay_on_this_host(self) -> "Settings":
        private = is_private(f"http://[{self.agent.host}]:1" if ":" in self.agent.host else f"http://{self.agent.host}:1")
        if self.agent.is_used and not (private or self.security.keys or self.security.allow_plaintext):
            raise ValueError(f"agent.host is {self.agent.host!r}: {EXPOSED}; or keep it at 127.0.0.1")
        return self

    @model_validator(mode="after")
    def _adapters_can_be_served(self) -> "Settings":
        if self.lora.publish != "adapter":
            return self
        for name in ("tensor_parallel", "expert_parallel", "data_parallel"):
            if getattr(self.rollout, name) > 1:
                raise ValueError(
                    f'lora.publish is "adapter" and rollout.{name} is {getattr(self.rollout, name)}: the model below '
                    'adapters can only be verified in a server of one rank; set it to 1, or lora.publish = "merged"'
                )
        if self.rollout.pause_mode == "in_place" and self.lora.max_loaded_loras <= self.batch.max_lag:
            raise ValueError(
                f'rollout.pause_mode is "in_place", batch.max_lag is {self.batch.max_lag} and lora.max_loaded_loras is '
                f"{self.lora.max_loaded_loras}: generations may be under way with the adapters of {self.batch.max_lag + 1} "
                'versions; raise lora.max_loaded_loras above max_lag, or use pause_mode = "retract"'
            )
        return self

    @model_validator(mode="after")
    def _weights_can_be_reached(self) -> "Settings":
        endpoint = self.learner.weights_endpoint
        if self.learner.advertised_weights_endpoint:
            require_endpoint("learner.advertised_weights_endpoint", self.learner.advertised_weights_endpoint)
        if not self.learner.advertised_weights_endpoint and endpoint.startswith(EVERY_ADDRESS):
            raise ValueError(
                f"learner.weights_endpoint is {endpoint!r}, which binds every address but tells rollouts none; set "
                "learner.advertised_weights_endpoint to what they connect to, such as tcp://learner:7003"
            )
        if (
            self.learner.num_nodes > 1
            and is_private(endpoint)
            and not is_private(f"tcp://{self.learner.rendezvous_address}")
        ):
            raise ValueError(
                f"learner.weights_endpoint is {endpoint!r} and learner.num_nodes is {self.learner.num_nodes}: each rank "
                "serves its part of the weights there, which other machines do not reach; set it to every address, such as "
                "tcp://0.0.0.0:7003, and learner.advertised_weights_endpoint to what rollouts connect to"
            )
        own = self.rollout.peer_weights_endpoint
        if own.startswith(EVERY_ADDRESS):
            raise ValueError(
                f"rollout.peer_weights_endpoint is {own!r}, which binds every address but tells other rollouts none; set it "
                "to this host's own, such as tcp://10.0.3.7:7004"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_possible(self) -> "Settings":
        if self.run.colocate:
            require_colocatable(self.learner, self.rollout, self.lora)
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
