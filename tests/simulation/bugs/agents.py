"""Bugs in agents' episodes: what they repeat after a kill, and what is trained of it."""

from tests.simulation.audit.agents import ANSWERS, COUNTED, GOES_ON, SAMPLED_ONCE, SEEN, STEP_DURABLE, STEP_ONCE
from tests.simulation.audit.books import SAME_CONTEXT
from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event


def _rollouts_die_amid_calls() -> tuple[Event, ...]:
    return tuple(Event(at=1.3 * at, kind="kill", target=("rollout-0",), seconds=0.3) for at in range(1, 16))


AGENTS = (
    Bug(
        name="a replay answers out of order",
        module="gspo_services.rollout.episodes.calls",
        old="if record.digest == live.digest:",
        new="if True:",
        invariants=(ANSWERS,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
        seed=6,
    ),
    Bug(
        name="turns that a replay does not repeat are trained on",
        module="gspo_services.rollout.episodes.calls",
        old="discarded = sorted(part.turn for _, part in self._unrepeated if part.turn is not None)",
        new="discarded = list[int]()",
        invariants=(SEEN,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
        reads_clock=True,
    ),
    Bug(
        name="a divergence is not seen",
        module="gspo_services.rollout.episodes.calls",
        old="        if self._unrepeated and self._replays:\n",
        new="        if False:\n",
        invariants=(COUNTED,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
        reads_clock=True,
    ),
    Bug(
        name="a side effect is done twice",
        module="gspo_services.rollout.episodes.calls",
        old="recorded.steps if self._replays else []",
        new="[]",
        invariants=(STEP_ONCE,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
    ),
    Bug(
        name="a step returns before it is durable",
        module="gspo_services.rollout.episodes.steps",
        old="        await self._writer.durable()\n",
        new="",
        invariants=(STEP_DURABLE,),
        agents="replay",
    ),
    Bug(
        name="a call that is continued begins again",
        module="gspo_services.rollout.episodes.sampler",
        old="input_ids=np.concatenate([part.prompt_ids, part.action_ids])",
        new="input_ids=part.prompt_ids",
        invariants=(SAMPLED_ONCE,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
    ),
    Bug(
        name="a recorded call is sampled anew",
        module="gspo_services.rollout.episodes.calls",
        old="        if not self._replays:\n            return None\n",
        new="        if True:\n            return None\n",
        invariants=(SAMPLED_ONCE,),
        weather=_rollouts_die_amid_calls(),
        agents="replay",
    ),
    Bug(
        name="the context of a call is rendered again after a restart",
        module="gspo_services.rollout.episodes.sampler",
        old="input_ids=np.concatenate([part.prompt_ids, part.action_ids])",
        new="input_ids=[*(shared.renderer.prompt_ids(live.request.messages) if len(part.action_ids) else part.prompt_ids), "
        "*part.action_ids]",
        invariants=(SAME_CONTEXT, ANSWERS),
        weather=_rollouts_die_amid_calls(),
        seed=2,
        agents="replay",
    ),
    Bug(
        name="a conversation that goes on is rendered again",
        module="gspo_services.rollout.episodes.place",
        old="            if bridge:\n",
        new="            if False:\n",
        invariants=(GOES_ON,),
        agents="replay",
    ),
    Bug(
        name="the learner mixes the sequences of an episode",
        module="gspo_services.learner.broker.assembly",
        old="arrays = self.token_ids[chosen], self",
        new="arrays = self.token_ids[: chosen.sum()], self",
        invariants=(SAME_CONTEXT,),
        agents="replay",
    ),
)
