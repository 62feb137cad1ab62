"""The roles that the policy plays in one episode: whose calls are whose, and whose reward is which."""

from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRefused, CallRequest, Calls
from gspo_services.rollout.work import EpisodeFailed


class WrongTurns(EpisodeFailed):
    """An agent has rewarded another number of answers than it got, or other roles than the policy has played."""


class InRole:
    """The calls of one episode as one of its roles. See ``Calls``."""

    def __init__(self, calls: Calls, role: int) -> None:
        self._calls = calls
        self._role = role

    @property
    def temperature(self) -> float:
        return self._calls.temperature

    def can_demand(self, request: CallRequest) -> bool:
        """See ``Calls.can_demand``."""
        return self._calls.can_demand(request)

    async def count(self, request: CallRequest) -> int:
        """See ``Calls.count``. Raises: CallRefused."""
        return await self._calls.count(request)

    def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        """See ``Calls.call``. Raises: CallRefused."""
        return self._calls.call(msgspec.structs.replace(request, role=self._role))


class WithoutRole:
    """The calls of an episode that has roles, made with the key that names none of them: all are refused."""

    def __init__(self, calls: Calls, roles: Sequence[str]) -> None:
        self.temperature = calls.temperature
        self._text = (
            f'agent.roles are {", ".join(roles)}: make each call as one of them, with episode.role("{roles[0]}").api_key'
        )

    def can_demand(self, request: CallRequest) -> bool:
        """See ``Calls.can_demand``. Raises: CallRefused."""
        raise CallRefused(400, "no_role", self._text)

    async def count(self, request: CallRequest) -> int:
        """See ``Calls.count``. Raises: CallRefused."""
        raise CallRefused(400, "no_role", self._text)

    def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        """See ``Calls.call``. Raises: CallRefused."""
        raise CallRefused(400, "no_role", self._text)


def rewards_of_roles(
    reward: float, components: Mapping[str, float], roles: Sequence[str], last_turns: Mapping[int, int]
) -> dict[int, float]:
    """Return the reward of each role that has played, by its last turn. ``last_turns``: by role.

    A reward that came as one number is that of each role; else its components are the roles' rewards. That of a role which
    has not played has nothing to train. Raises: WrongTurns for a component that is no role, and for a role that has played
    and has no reward.
    """
    if not components:
        return dict.fromkeys(last_turns.values(), reward)
    if unknown := [name for name in components if name not in roles]:
        raise WrongTurns(f'it rewards "{unknown[0]}", and agent.roles are {", ".join(roles)}')
    if lacking := [roles[role] for role in last_turns if roles[role] not in components]:
        raise WrongTurns(f'the policy has played "{lacking[0]}", which has no reward: name it beside the others')
    return {turn: components[roles[role]] for role, turn in last_turns.items()}
