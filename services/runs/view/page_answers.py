"""Answers the page's requests with plain data; every look at a run happens in the run's own thread."""

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import NoLedger, StoreCorrupt
from gspo_services.runs.learning import compared_tasks, shown_answers
from gspo_services.runs.metrics import MetricsFollower, learning_watch
from gspo_services.runs.reading import OpenRun, RunFacts
from gspo_services.runs.view.groups import Learned, chosen_groups, groups_of_batch
from gspo_services.runs.view.learner_numbers import LearnerNumbers
from gspo_services.runs.view.overview import Curves
from gspo_services.runs.view.progress import plain_progress
from gspo_services.runs.view.queries import one_of, whole_number
from gspo_services.runs.view.trajectories import plain_trajectory, texts_of_task
from gspo_services.runs.view.watched_run import WatchedRun
from gspo_services.shared.learning import LearningWatch, Tasks
from gspo_services.shared.settings import Settings

NUMBERS: Final = ("evaluation", "task_index")
WORDS: Final = {
    "status": ("open", "complete", "batched", "dropped", "evaluated", "filtered", "quarantined", "requeued", "resampled"),
    "split": ("train", "eval"),
    "drop_reason": ("stale", "failed"),
}


class NotThere(LookupError):
    """The request names something that is not in the run."""


class PageAnswers:
    """Answers for all runs on the page. Raises: NoLedger, StoreCorrupt, OSError with texts for the user; NotThere."""

    def __init__(self, runs: Mapping[str, WatchedRun], learner: LearnerNumbers) -> None:
        self._runs = runs
        self._learner = learner

    async def runs(self) -> list[dict[str, Any]]:
        """Return each run and how far it is; a run that cannot be read says why."""
        return [await run.call(lambda run=run: _summary(run)) for run in self._runs.values()]  # type: ignore[misc]

    async def warm(self) -> None:
        """Read every run's curves before somebody waits for them. A request reports what cannot be read."""
        await self.runs()

    async def overview(self, run: WatchedRun) -> dict[str, Any]:
        """Curves, evaluations and events; from metrics.jsonl alone where there is no ledger of this release."""
        return await run.call(lambda: _overview(run))

    async def groups(self, run: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
        """Return groups of a batch, or those with certain values. Raises: ValueError for an impossible value."""
        batch = whole_number(query, "batch")
        first = whole_number(query, "first") or 0
        chosen: dict[str, Any] = {name: whole_number(query, name) for name in NUMBERS if name in query}
        for name, words in WORDS.items():
            if name in query:
                chosen[name] = one_of(query, name, words)

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                settings = opened.facts().settings
                if batch is None:
                    return chosen_groups(opened, first, settings, chosen)
                learned, error = self._learned(run, opened, batch)
                found = groups_of_batch(opened, batch, settings, learned)
                if found is None:
                    raise NotThere(f"batch {batch} was not assembled (yet)")
                return found | {"learner_error": error}

        return await run.call(look)

    async def trajectory(self, run: WatchedRun, trajectory_id: int) -> dict[str, Any]:
        """Return one trajectory with its tokens."""

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                settings = opened.facts().settings
                batch = _batch_of(opened, trajectory_id)
                learned, error = ({}, "") if batch is None else self._learned(run, opened, batch)
                events = run.timeline.of_trajectory(trajectory_id)
                found = plain_trajectory(opened, trajectory_id, settings, run.texts, learned, events)
                if found is None:
                    raise NotThere(f"there is no trajectory {trajectory_id}")
                if batch is not None and trajectory_id in learned:
                    found["learned_tokens"] = self._learner.tokens(run, batch, trajectory_id)
                return found | {"learner_error": error}

        return await run.call(look)

    def _learned(self, run: WatchedRun, opened: OpenRun, batch: int) -> tuple[Learned, str]:
        """What the learner computed; a damaged token dump is said, and the rest of the page stays readable."""
        try:
            return self._learner.of_batch(run, opened, batch), ""
        except (ValueError, OSError) as error:
            return {}, str(error)

    async def task(self, run: WatchedRun, split: str, task_index: int) -> dict[str, Any]:
        """Return what the policy wrote for one task over the versions."""

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                found = texts_of_task(opened, split, task_index, run.texts, evaluations_only=split == "eval")
            if not found["episodes"]:
                raise NotThere(f"no episode of {split} task {task_index} was started")
            return found

        return await run.call(look)

    async def learner_state(self, run: WatchedRun, batch: int) -> dict[str, Any]:
        """Return whether the learner's numbers of a batch exist, and how far a replay for them is."""
        return await run.call(lambda: self._learner.state(run, batch))

    async def start_replay(self, run: WatchedRun, batch: int) -> dict[str, Any]:
        """Replay up to a batch in another process, beside the run, for the learner's numbers."""

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                if opened.batch(batch) is None:
                    raise NotThere(f"batch {batch} was not assembled (yet)")
            self._learner.start(run, batch)
            return self._learner.state(run, batch)

        return await run.call(look)


def _summary(run: WatchedRun) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": run.name, "directory": str(run.directory), "error": ""}
    try:
        with run.opened() as opened:
            run.curves.read(opened.lines())
            plain |= plain_facts(opened.facts())
    except (NoLedger, StoreCorrupt, OSError) as error:
        plain["error"] = str(error)
    last = max(run.curves.evaluations, default=None)
    plain["held_out"] = None if last is None else run.curves.evaluations[last]["reward"]
    plain["reward"] = run.curves.last_batch.get("reward")
    return plain


def _overview(run: WatchedRun) -> dict[str, Any]:
    error, facts, curves, tasks, progress = "", None, run.curves, None, None
    try:
        with run.opened() as opened:
            found = opened.facts()
            facts = plain_facts(found)
            run.curves.read(opened.lines())
            progress = plain_progress(opened, found, run.curves)
            tasks = compared_tasks(opened, curves.learning)
        _read_answers(run, found.settings)
    except (NoLedger, StoreCorrupt, OSError) as problem:
        if not (run.directory / METRICS_FILE).is_file():
            raise
        error = str(problem)
        # Made anew each time: the page keeps what the ledger said.
        curves = Curves(lambda: learning_watch(run.directory))
        follower = MetricsFollower(run.directory / METRICS_FILE)
        curves.take(follower.rows())
        damage: list[str] = []
        follower.tell_damage(damage.append)
        error = "\n".join([error, *damage])
    processes = run.timeline.events()
    return {
        "name": run.name,
        "facts": facts,
        "progress": progress,
        "error": error,
        **curves.plain(),
        "learning": _learning(run, curves.learning, tasks),
        "events": [*curves.events[-500:], *processes],
        "dropped": curves.dropped,
    }


def _read_answers(run: WatchedRun, settings: Settings | None) -> None:
    """Read some answers, once for the same findings: it may take all tasks of the run to say what was expected."""
    names = tuple(each.name for each in run.curves.learning.findings)
    if names != run.answers[0]:
        found = [] if settings is None or not names else shown_answers(run.directory, settings)
        run.answers = names, list(map(str, found))


def _learning(run: WatchedRun, watch: LearningWatch, tasks: Tasks | None) -> dict[str, Any]:
    return {
        "outcome": watch.outcome(tasks).text if watch.num_batches else "",
        "findings": [{"text": str(each), "is_wrong": each.is_wrong} for each in watch.findings],
        "answers": run.answers[1] if watch.findings else [],
        "not_measured": watch.not_measured if watch.findings else [],
    }


def plain_facts(facts: RunFacts) -> dict[str, Any]:
    """Return what the head of the page shows of a run."""
    settings = facts.settings
    return {
        "run_id": facts.run_id,
        "is_live": facts.is_live,
        "num_batches": facts.num_batches,
        "num_trained": facts.num_trained,
        "wanted_batches": None if settings is None else settings.run.num_batches,
        "policy_version": facts.policy_version,
        "num_groups": facts.num_groups,
        "num_trajectories": facts.num_trajectories,
        "stop_reason": facts.stop_reason,
        "run_error": facts.error,
        "settings_error": facts.settings_error,
        "environment": None if settings is None else settings.environment.name,
        "model": None if settings is None else str(settings.model.path),
        "max_lag": None if settings is None else settings.batch.max_lag,
        "dumps_tokens": settings is not None and settings.learner.dump_tokens,
    }


def _batch_of(opened: OpenRun, trajectory_id: int) -> int | None:
    trajectory = opened.trajectory(trajectory_id)
    group = None if trajectory is None else opened.group(trajectory.group_id)
    return None if group is None else group.batch
