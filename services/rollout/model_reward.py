"""The reward model's part of an episode's reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gspo.tasks.environments import ChatMessage, Environment, Start, State, Step
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import RewardPart, Score
from gspo_services.tasks.reward_model import ModelScore, RewardModel, RewardModelOptions
from gspo_services.tasks.worker.reward_value import UnscoredError

MODEL: Final = "model"
"""The component that is the model's score."""
ENVIRONMENT: Final = "environment"
"""The component that is the environment's own reward, where that is one number."""
ModelUse = Literal["always", "needed", "never"]
"""Which episodes the model scores: all, those that have no other reward, or none, because nobody wants it loaded."""


@dataclass(frozen=True, kw_only=True)
class ModelReward:
    """The model, and what its score counts."""

    model: RewardModel
    weight: float
    is_all: bool
    """The environment has no reward of its own."""
    took: Callable[[RewardPart, float], None] = lambda part, seconds: None

    def added(self, own: Score, earlier: Sequence[float], names: Collection[str], score: float) -> Score:
        """The reward of an episode's last turn, ``own`` without the model's ``score``.

        ``earlier``: the rewards of the turns before; ``names``: the components of the whole episode so far.
        Raises: UnscoredError when one of them has the name of the model's.
        """
        if MODEL in own.components:
            raise UnscoredError(
                "bad_component",
                f"the environment's reward has a component called \"{MODEL}\", which is the reward model's: rename it",
            )
        components = {**own.components, MODEL: score}
        if not self.is_all and not own.components and not set(names) - {MODEL, ENVIRONMENT}:
            components[ENVIRONMENT] = math.fsum([*earlier, own.reward])
        return Score(own.reward + self.weight * score, components)

    async def score(self, messages: list[ChatMessage]) -> ModelScore:
        """See ``RewardModel.score``."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        said = await self.model.score(messages)
        self.took("model", clock() - begin)
        return said


def conversation(start: Start, actions: Sequence[str], step: Callable[[State, str], Step]) -> list[ChatMessage]:
    """The messages of an episode that took these actions, played again: its tokens do not say where messages begin.

    ``step``: the environment's. Raises: its errors.
    """
    state, messages = start.state, list(start.messages)
    for number, action in enumerate(actions):
        messages.append({"role": "assistant", "content": action})
        if number + 1 < len(actions):
            answer = step(state, action)
            state, messages = answer.state, [*messages, *answer.messages]
    return messages


@asynccontextmanager
async def open_model_reward(
    settings: Settings, environment: Environment, use: ModelUse, took: Callable[[RewardPart, float], None]
) -> AsyncIterator[ModelReward | None]:
    """Open the reward model of ``settings`` for its environment; None: there is none, or ``use`` is against it.

    Raises: ConfigurationError when the environment needs one and there is none, or the files are none; ServiceError.
    """
    reward, is_needed = settings.reward, environment.needs_reward_model
    if is_needed and not reward.model:
        raise ConfigurationError(
            f'environment "{settings.environment.name}" has no reward of its own, and reward.model is "": name a reward '
            "model there; or give the environment a reward, for dataset with reward, reward_url or answer_column"
        )
    if not reward.model or use == "never" or (use == "needed" and not is_needed):
        yield None
        return
    async with RewardModel(_options(settings)) as model:
        yield ModelReward(model=model, weight=reward.model_weight, is_all=is_needed, took=took)


def _options(settings: Settings) -> RewardModelOptions:
    reward = settings.reward
    return RewardModelOptions(
        path=str(Path(reward.model).expanduser()),
        device=reward.model_device,
        dtype=reward.model_dtype,
        input=reward.model_input,
        max_tokens=reward.model_max_tokens,
        too_long=reward.model_too_long,
        batch_tokens=reward.model_batch_tokens,
        deadline_s=reward.model_deadline_s,
        owner=str(settings.run.directory.absolute()),
    )
