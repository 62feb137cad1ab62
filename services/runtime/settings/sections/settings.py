"""All sections together, and the checks that concern more than one."""

from pydantic import BaseModel, ConfigDict, model_validator

from protocol.endpoints import require_endpoint
from services.runtime.settings.exposure import EVERY_ADDRESS, EXPOSED, is_private
from services.runtime.settings.sections.agent import AgentSection
from services.runtime.settings.sections.broker import Broker
from services.runtime.settings.sections.learner import Learner
from services.runtime.settings.sections.objective import ObjectiveSettings
from services.runtime.settings.sections.reward import RewardSection
from services.runtime.settings.sections.rollout import Rollout
from services.runtime.settings.sections.run import BatchSection, EnvironmentSection, Evaluation, Model, Run, Sampling
from services.runtime.settings.sections.security import SecuritySection
from services.runtime.settings.sections.trackers import TrackersSection


class Settings(BaseModel):
    """All sections of a run's configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: Run = Run()
    model: Model = Model()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    agent: AgentSection = AgentSection()
    sampling: Sampling = Sampling()
    batch: BatchSection = BatchSection()
    objective: ObjectiveSettings = ObjectiveSettings()
    evaluation: Evaluation = Evaluation()
    broker: Broker = Broker()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    security: SecuritySection = SecuritySection()
    trackers: TrackersSection = TrackersSection()

    @model_validator(mode="after")
    def _trajectory_fits_cache(self) -> "Settings":
        if self.rollout.max_total_tokens < self.sampling.max_tokens:
            raise ValueError(
                f"rollout.max_total_tokens is {self.rollout.max_total_tokens} and sampling.max_tokens is "
                f"{self.sampling.max_tokens}: a server could not hold one trajectory; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _trajectories_can_be_overlong(self) -> "Settings":
        limit = self.sampling.max_tokens
        for name in ("overlong_filter_tokens", "overlong_buffer_tokens"):
            tokens = getattr(self.objective, name)
            if tokens is not None and tokens > limit:
                raise ValueError(
                    f"objective.{name} is {tokens} and sampling.max_tokens is {limit}: no trajectory has that many tokens; "
                    "lower the first or raise the second"
                )
        return self

    @model_validator(mode="after")
    def _leases_outlast_generations(self) -> "Settings":
        if self.broker.idle_lease_s <= self.rollout.engine_timeout_s:
            raise ValueError(
                f"broker.idle_lease_s is {self.broker.idle_lease_s:g} and rollout.engine_timeout_s is "
                f"{self.rollout.engine_timeout_s:g}: its lease would end while a rollout still waits for the engine; "
                "raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_agents(self) -> "Settings":
        if self.agent.is_used and self.broker.idle_lease_s <= self.agent.deadline_s:
            raise ValueError(
                f"broker.idle_lease_s is {self.broker.idle_lease_s:g} and agent.deadline_s is {self.agent.deadline_s:g}: an "
                "episode's lease would end while its agent still works; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _agents_stay_on_this_host(self) -> "Settings":
        private = is_private(f"http://[{self.agent.host}]:1" if ":" in self.agent.host else f"http://{self.agent.host}:1")
        if self.agent.is_used and not (private or self.security.keys or self.security.allow_plaintext):
            raise ValueError(f"agent.host is {self.agent.host!r}: {EXPOSED}; or leave it at 127.0.0.1")
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
