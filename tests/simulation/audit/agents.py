"""What an agent sees is what was sampled for it, once; what is trained on is what it saw; its side effects happen once."""
# ruff: noqa: B023 - the text of a violation is made at once

from collections import Counter
from collections.abc import Sequence

from gspo.model.packing import TrainSequence
from gspo_services.broker.rows import TrajectoryRow
from tests.simulation.agents.chat import Conversation, bridge_ids, questioned, text_of
from tests.simulation.audit.books import SAME_CONTEXT, Books
from tests.simulation.audit.runs import AgentRun, Answer, Step, by_question, steps_in
from tests.simulation.audit.sequences import NO_CONTEXT, Turn, following, sequences_of

SAMPLED_ONCE = "agents: nothing acknowledged is sampled again"
ANSWERS = "agents: an answer is that to its question"
GOES_ON = "agents: a conversation goes on after what was sampled"
STEP_ONCE = "agents: a step is done once"
STEP_DURABLE = "agents: a step returns when it is durable"
SEEN = "agents: what is trained on is what the agent saw"
COUNTED = "agents: a divergence is counted"


class Generation:
    """One request to an engine: where in which answer its next token stands."""

    def __init__(self, trajectory_id: int, epoch: int, input_ids: Sequence[int], *, of_agent: bool) -> None:
        self.trajectory_id = trajectory_id
        self.epoch = epoch
        self.context = following(NO_CONTEXT, input_ids)
        self.question: Conversation | None = None
        self.place = 0
        if of_agent:
            self.question, begin = questioned(input_ids)
            self.place = len(input_ids) - begin

    def go_on(self, token: int) -> None:
        """``token`` was made."""
        self.context = following(self.context, [token])
        self.place += 1


class AgentAudit(Books):
    """Checks what agents ask, get, do and earn."""

    num_effects = 0
    """Side effects of steps."""

    # --- the engine -----------------------------------------------------------------------------------------------------

    def samples(self, session: str, generation: Generation) -> None:
        """The engine samples the next token of an agent's answer."""
        question, place = generation.question, generation.place
        if question is None:
            return
        if not place:
            self.begun[generation.trajectory_id][question].add(generation.context)
        run = self.runs[generation.trajectory_id, generation.epoch][-1]
        assert run.session == session
        run.sampled[question, place] += 1
        recorded, sampled, asked = run.num_recorded(question, place), run.sampled[question, place], run.asked[question]
        self.require(
            not run.replays or recorded + sampled <= asked,
            SAMPLED_ONCE,
            lambda: (
                f"{session} samples token {place} of the answer to {_shown(question)} in trajectory {run.trajectory_id}, "
                f"epoch {run.epoch}; its lease brought it {recorded} times, sampled it is {sampled} times, asked {asked}"
            ),
        )

    # --- the agent ------------------------------------------------------------------------------------------------------

    def agent_begins(self, session: str, trajectory_id: int, epoch: int) -> AgentRun:
        """An agent's code is started."""
        num_tokens, num_entries = self.leased[trajectory_id, epoch]
        brought = sequences_of(self.durable.chunks.get(trajectory_id, ()), num_tokens)
        journal = self.durable.journals.get(trajectory_id, [])[:num_entries]
        replays = self.rules.replays
        run = AgentRun(
            session=session,
            trajectory_id=trajectory_id,
            epoch=epoch,
            replays=replays,
            recorded=by_question([_said(turn) for turn in brought.turns()] if replays else []),
            steps=steps_in(journal) if replays else (),
        )
        self.runs[trajectory_id, epoch].append(run)
        return run

    def answered(self, run: AgentRun, question: Conversation, token_ids: Sequence[int], *, goes_on: bool) -> None:
        """The agent gets an answer. ``goes_on``: nothing else went on from the answer that the question ends with."""
        begins = [
            context for context in self.begun[run.trajectory_id][question]
            if self.was_made(run.trajectory_id, following(context, token_ids[:-1]), token_ids[-1])
        ]  # fmt: skip
        self.require(
            run.gets(question, tuple(token_ids)) and bool(begins),
            ANSWERS,
            lambda: (
                f"trajectory {run.trajectory_id}, epoch {run.epoch}: the agent asks {_shown(question)} and gets "
                f"{list(token_ids)}, which engines {'made' if begins else 'did not make'} there; the lease brought "
                f"{run.recorded.get(question, [])}"
            ),
        )
        for recorded in run.recorded.get(question, ())[:1]:
            self.happened["call replayed" if len(recorded) == len(token_ids) else "call continued"] += 1
        # Where an agent has left the record, what it goes on from may have a record behind it.
        if goes_on and not (self.rules.reads_clock and run.recorded):
            self._goes_on(run, question, begins)
        text = text_of(token_ids)
        ends = {(following(context, token_ids), token_ids[-1]) for context in begins}
        self.ended[run.trajectory_id][(*question, ("assistant", text))] |= ends

    def _goes_on(self, run: AgentRun, question: Conversation, begins: Sequence[int]) -> None:
        *said, (role, text) = question
        expected = {
            following(context, bridge_ids(last, [{"role": role, "content": text}]))
            for context, last in self.ended[run.trajectory_id][tuple(said)]
        }
        self.require(
            bool(expected.intersection(begins)),
            GOES_ON,
            lambda: (
                f"trajectory {run.trajectory_id}, epoch {run.epoch}: {_shown(question)} was answered in another context "
                "than after the tokens that were sampled"
            ),
        )

    # --- steps ----------------------------------------------------------------------------------------------------------

    def does_step(self, run: AgentRun, name: str, arguments: str) -> int:
        """The side effect of the run's next step. Returns what nobody can know but who has seen it."""
        recorded = run.recorded_step()
        self.require(
            recorded is None or (recorded.name, recorded.arguments) != (name, arguments),
            STEP_ONCE,
            lambda: (
                f"trajectory {run.trajectory_id}, epoch {run.epoch}: step {run.num_steps} ({name}) is done, and its lease "
                f"brought the result {recorded}"
            ),
        )
        self.num_effects += 1
        return self.num_effects

    def step_returned(self, run: AgentRun, name: str, arguments: str, result: object) -> None:
        """The agent has the result of its next step."""
        recorded = run.recorded_step()
        if recorded is not None and (recorded.name, recorded.arguments) == (name, arguments):
            self.happened["step replayed"] += 1
            self.require(
                recorded.result == result,
                STEP_ONCE,
                lambda: f"trajectory {run.trajectory_id}: step {run.num_steps} returns {result}, recorded is {recorded}",
            )
        else:
            if recorded is not None:
                run.follows_steps = False
                self.happened["step diverged"] += 1
                self.divergences[run.session] += 1
            self._require_durable(run, Step(name, arguments, result))
        run.num_steps += 1

    def _require_durable(self, run: AgentRun, step: Step) -> None:
        """A step returns after its record is on disk, and all that the agent has seen before it."""
        row = self.durable.trajectories[run.trajectory_id]
        if (row.status, row.epoch, row.holder_session) != ("leased", run.epoch, run.session):
            return  # What it still does is nobody's.
        durable = Counter(_said(turn) for turn in self.log_of(run.trajectory_id).turns())
        steps = steps_in(self.durable.journals.get(run.trajectory_id, []))
        self.require(
            run.num_steps < len(steps) and steps[run.num_steps] == step and not run.seen - durable,
            STEP_DURABLE,
            lambda: (
                f"trajectory {run.trajectory_id}, epoch {run.epoch}: step {run.num_steps} returned {step}; on disk are "
                f"{steps}, and without these answers that the agent has seen: {list(run.seen - durable)}"
            ),
        )

    # --- the end --------------------------------------------------------------------------------------------------------

    def agent_finished(self, row: TrajectoryRow) -> None:
        """An agent's episode is over: what is kept is what one run of the agent saw, with the reward of this run."""
        discarded = set(row.discarded_turns)
        turns = self.log_of(row.trajectory_id).turns()
        kept = Counter(_said(turn) for turn in turns if turn.turn not in discarded)
        earned = (sum(row.turn_rewards), row.components)
        runs = self.runs[row.trajectory_id, row.epoch]
        run = next((run for run in reversed(runs) if run.seen == kept and run.earned == earned), None)
        self.require(
            run is not None,
            SEEN,
            lambda: (
                f"trajectory {row.trajectory_id} is finished with the reward {earned} and the answers {list(kept)}; its "
                f"agent saw and earned {[(list(run.seen), run.earned) for run in runs]}"
            ),
        )
        if discarded and run is not None:
            self.happened["turns discarded"] += 1
            self.divergences[run.session] += run.replays

    def counts_divergences(self, session: str, number: float) -> None:
        """A rollout's own count of agents that did not repeat what they did."""
        expected = self.divergences[session]
        self.require(number >= expected, COUNTED, lambda: f"{session} counts {number:g} divergences, {expected} happened")

    # --- training -------------------------------------------------------------------------------------------------------

    def trains_sequences(self, trajectory_id: int, sequences: Sequence[TrainSequence]) -> None:
        """Each token is trained under the context in which an engine sampled it."""
        for sequence in sequences:
            context = NO_CONTEXT
            token_ids, actions = sequence.token_ids.tolist(), sequence.action_mask.tolist()
            for token, is_action, logprob in zip(token_ids, actions, sequence.behaviour_logprobs.tolist(), strict=True):
                self.require(
                    not is_action or self.was_made(trajectory_id, context, token, logprob),
                    SAME_CONTEXT,
                    lambda: f"trajectory {trajectory_id}: token {token} ({logprob}) is trained where no engine made it",
                )
                context = following(context, [token])


def _said(turn: Turn) -> tuple[Conversation, Answer]:
    return questioned(turn.prompt_ids)[0], tuple(turn.token_ids)


def _shown(question: Conversation) -> str:
    return " ".join(f"{role}:{text}" for role, text in question)
