"""One trajectory as the page shows it: messages, tokens with all their numbers, leases, siblings."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_services.broker.store import StoreCorrupt
from gspo_services.runs.reading import OpenRun, RecordedTokens, RecordedTrajectory
from gspo_services.runs.view.groups import Learned, plain_groups, roles_of, source_of
from gspo_services.runs.view.texts import Texts
from gspo_services.shared.settings import Settings

MOST_TOKENS: Final = 65_536
"""Tokens in one answer of the server; a longer trajectory is cut there."""
MOST_TEXTS: Final = 120
"""Episodes of one task whose texts are sent at once: the newest ones."""


def plain_trajectory(
    run: OpenRun,
    trajectory_id: int,
    settings: Settings | None,
    texts: Texts,
    learned: Learned,
    log_events: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Return everything about one trajectory; None when it does not exist."""
    trajectory = run.trajectory(trajectory_id)
    group = None if trajectory is None else run.group(trajectory.group_id)
    if trajectory is None or group is None:
        return None
    plain: dict[str, Any] = {
        "group": plain_groups(run, [group], settings, learned)[0],
        "group_id": group.group_id,
        "id": trajectory_id,
        "turn_rewards": trajectory.turn_rewards,
        "discarded_turns": trajectory.discarded_turns,
        "turn_roles": _named(trajectory.turn_roles, roles_of(settings)),
        "holder": trajectory.holder,
        "learned": learned.get(trajectory_id),
        "log_events": log_events,
        "damage": "",
    }
    try:
        tokens = run.tokens(trajectory_id)
    except StoreCorrupt as damage:
        # The rest of the page stays readable.
        return plain | {"damage": str(damage)}
    return plain | _token_columns(tokens, texts) | _leases(tokens, trajectory)


def _named(turn_roles: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the role of each turn, by its number where the settings that named it are gone."""
    return [names[role] if role < len(names) else f"role {role + 1}" for role in turn_roles]


def _token_columns(tokens: RecordedTokens, texts: Texts) -> dict[str, Any]:
    shown = slice(0, MOST_TOKENS)
    ids = tokens.token_ids_T[shown].tolist()
    special = texts.special_ids if texts.load() else frozenset()
    return {
        "num_tokens": tokens.num_tokens,
        "ids": ids,
        "texts": texts.of(ids),
        "text_error": texts.error,
        "special": [index for index, token_id in enumerate(ids) if token_id in special],
        "logprobs": tokens.logprobs_T[shown].tolist(),
        "versions": tokens.versions_T[shown].tolist(),
        "trained": tokens.is_trained_T[shown].astype(int).tolist(),
        "epochs": tokens.epochs_T[shown].tolist(),
        "sequences": tokens.sequences_T[shown].tolist() if tokens.sequences_T.any() else None,
        "segments": [[each.kind, each.turn, each.num_tokens, each.sequence] for each in tokens.segments],
    }


def _leases(tokens: RecordedTokens, trajectory: RecordedTrajectory) -> dict[str, Any]:
    return {
        "leases": tokens.leases,
        "chunks": [
            {"start": each.start, "tokens": each.num_tokens, "epoch": each.epoch, "turn_done": each.turn_done}
            for each in tokens.chunks
        ],
        "epoch": trajectory.epoch,
    }


def texts_of_task(run: OpenRun, split: str, task_index: int, texts: Texts, *, evaluations_only: bool) -> dict[str, Any]:
    """Return the policy's texts for one task, version by version: the newest MOST_TEXTS episodes, oldest first."""
    episodes: list[dict[str, Any]] = []
    prompt, number, source = "", 0, split
    for group in run.groups(split="eval" if evaluations_only else split, task_index=task_index):
        number += len(group.members)
        source = source_of(run, group.split == "eval", group.evaluation)
        episodes += [{"group": group, "member": member} for member in group.members]
        del episodes[:-MOST_TEXTS]
    shown = []
    for episode in episodes:
        group, member = episode["group"], episode["member"]
        plain = {
            "id": member.trajectory_id,
            "group_id": group.group_id,
            "batch": group.batch,
            "evaluation": group.evaluation,
            "policy_version": group.policy_version if group.policy_version is not None else member.min_version or None,
            "status": group.status if member.status != "failed" else "failed",
            "drop_reason": group.drop_reason,
            "reward": member.reward,
            "tokens": member.num_tokens,
            "parts": [],
        }
        try:
            prompt_text, plain["parts"] = _parts(run.tokens(member.trajectory_id), texts)
            prompt = prompt or prompt_text
        except StoreCorrupt as damage:
            plain["damage"] = str(damage)
        shown.append(plain)
    found = {"split": split, "source": source, "task_index": task_index, "prompt": prompt, "episodes": shown}
    return found | {"num_episodes": number, "text_error": texts.error}


def _parts(tokens: RecordedTokens, texts: Texts) -> tuple[str, list[dict[str, str]]]:
    """Return the text before the first action, and the parts from there on."""
    pieces = texts.of(tokens.token_ids_T.tolist())
    special = texts.special_ids if texts.load() else frozenset()
    ids = tokens.token_ids_T.tolist()
    prompt, at = "", 0
    parts: list[dict[str, str]] = []
    for segment in tokens.segments:
        end = at + segment.num_tokens
        text = "".join(piece for piece, token_id in zip(pieces[at:end], ids[at:end], strict=True) if token_id not in special)
        if segment.kind == "observation" and not parts:
            prompt += text
        else:
            parts.append({"kind": segment.kind, "text": text})
        at = end
    return prompt, parts
