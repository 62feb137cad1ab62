"""The run as plain data, for its operators."""

from typing import Any, Final

from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S, Peer, Peers
from gspo_services.broker.ledger.fleet import Fleet
from gspo_services.broker.ledger.state import State
from gspo_services.broker.ledger.training import Training

NAMED_BATCHES: Final = 8
"""At most this many of the quarantined batches are described; the others are counted."""


def status_of(state: State, peers: Peers, fleet: Fleet, training: Training, now: float) -> dict[str, Any]:
    """Return plain data; None for what is not known yet."""
    batches = state.batches
    last = batches.last
    evaluated = state.evaluations.last_done
    evaluating = state.evaluations.open
    return {
        "run_id": state.config.run_id,
        "batches_trained": batches.num_trained,
        "batches_assembled": batches.num_assembled,
        "batches_total": state.config.num_batches,
        "batches_checkpointed": batches.checkpointed,
        "policy_version": batches.newest_version,
        "train_reward": last.stats.mean_reward if last is not None else None,
        "lag_mean": last.stats.mean_lag if last is not None else None,
        "lag_max": last.stats.max_lag if last is not None else None,
        "eval_reward": evaluated.reward if evaluated is not None else None,
        "eval_policy_version": evaluated.policy_version if evaluated is not None else None,
        "eval_open_version": min((row.policy_version for row in evaluating), default=None),
        "eval_open_sets": [row.name for row in evaluating if row.name],
        "tokens_per_s": training.tokens_per_s,
        "groups": groups_by_state(state),
        "dropped": dict(state.num_dropped),
        "quarantined": _quarantined(state),
        "filtered": {"groups": state.run.filtered_groups, "limit": state.config.sampling.max_filtered},
        "resting": state.rests.num_resting(state.batches.num_assembled),
        "prompts_started": state.next_prompt,
        "rollouts": [_rollout(state, peer, fleet, now) for peer in peers.of_role("rollout")],
        "rollouts_gone": fleet.gone,
        **_learner(peers, now),
        "waiting_for": training.waiting_for(),
        "quiet_s": training.quiet_s(now),
        "stopping": state.stop_reason,
        "finished": state.finished,
        "error": state.run.error,
    }


def _learner(peers: Peers, now: float) -> dict[str, Any]:
    """The learner that has the run, if it is connected, and another one that wants the run, by their tags."""
    holder = next(iter(peers.of_role("learner")), None)
    waiting = peers.turned_away
    waits = waiting is not None and now - waiting[1] < LEARNER_LEASE_S
    return {
        "learner": None if holder is None else holder.key.peer,
        "learner_session": None if holder is None else holder.key.tag,
        "learner_silent_s": None if holder is None else now - holder.last_seen,
        "learner_waiting": waiting[0].tag if waiting is not None and waits else None,
    }


def _quarantined(state: State) -> dict[str, Any]:
    """What waits for an operator: the newest batches by name."""
    waiting = state.quarantine.waiting()
    named = [row for row in state.quarantine.batches if row.index in waiting][-NAMED_BATCHES:]
    return {
        "batches": len(waiting),
        "groups": sum(waiting.values()),
        "newest": [
            {"batch": row.index, "groups": waiting[row.index], "policy_version": row.policy_version, "reason": row.reason}
            for row in named
        ],
    }


def groups_by_state(state: State) -> dict[str, int]:
    """Count training groups by state."""
    complete = state.groups.num_complete
    return {
        "open": state.groups.num_training - complete,
        "complete": complete,
        "batched": state.num_batched_groups,
        "dropped": sum(state.num_dropped.values()),
        "filtered": state.num_filtered_groups,
        "quarantined": state.quarantine.num_groups,
    }


def _rollout(state: State, peer: Peer, fleet: Fleet, now: float) -> dict[str, Any]:
    leases = sum(1 for row in state.groups.leased() if row.holder_peer == peer.key.peer)
    return {
        "peer": peer.key.peer,
        "status": fleet.state(peer.key.peer),
        "policy_version": peer.policy_version,
        "leases": leases,
        "silent_s": now - peer.last_seen,
    }
