"""Writes an agent's episode into its journal, and reads it back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gspo_protocol.limits import MAX_SEQUENCES
from gspo_protocol.messages import Plain
from gspo_services.rollout.episodes.log import EpisodeLog, Round
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.tasks.agents import RecordedStep


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call before anything is sampled for it."""

    ordinal: int
    """Calls before it. A later record of the same ordinal replaces this one: when its observation was never sent, and when
    the engine ended the answer before ``max_tokens``."""
    sequence: int
    digest: str
    id: str
    created: int
    max_tokens: int
    """The tokens it may sample, which depended on concurrent calls."""
    opening: int = 0
    """How many tokens before the sampled ones begin the answer, where the agent demanded a call of a tool."""

    role: int = 0
    """See ``CallRequest.role``."""

    def entry(self) -> Plain:
        """As an entry of the journal. A rollout that knows no openings and roles reads those of all other calls."""
        written = msgspec.structs.asdict(self)
        return {"call": {name: value for name, value in written.items() if value or name not in ("opening", "role")}}


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step with its result. A record of an ordinal replaces an earlier one, and all that came after it: the agent has
    gone another way from there."""

    ordinal: int
    name: str
    arguments: str
    result: Any

    def entry(self) -> Plain:
        """As an entry of the journal."""
        return {"step": msgspec.structs.asdict(self)}


class RecordedEpisode(NamedTuple):
    """What a journal holds, with the tokens of each call."""

    calls: list[tuple[CallRecord, Round]]
    steps: list[RecordedStep]


def read_journal(entries: Sequence[Plain], log: EpisodeLog) -> RecordedEpisode:
    """Raises: EpisodeFailed for a journal that no agent's episode has written, or that does not belong to the tokens."""
    records: list[CallRecord] = []
    steps: list[RecordedStep] = []
    for place, entry in enumerate(entries):
        try:
            if "step" in entry:
                step = msgspec.convert(entry["step"], StepRecord)
                if not 0 <= step.ordinal <= len(steps):
                    raise EpisodeFailed(f"entry {place} of the journal is step {step.ordinal} after {len(steps)} steps")
                steps[step.ordinal :] = [RecordedStep(step.name, step.arguments, step.result)]
                continue
            record = msgspec.convert(entry.get("call"), CallRecord)
        except msgspec.ValidationError as error:
            raise EpisodeFailed(f"entry {place} of the journal is neither a call nor a step: {error}") from error
        if not (0 <= record.ordinal <= len(records) and 0 <= record.sequence < MAX_SEQUENCES):
            raise EpisodeFailed(f"entry {place} of the journal is call {record.ordinal} after {len(records)} calls")
        records[record.ordinal : record.ordinal + 1] = [record]
    return RecordedEpisode(_with_tokens(records, log), steps)


def _with_tokens(records: Sequence[CallRecord], log: EpisodeLog) -> list[tuple[CallRecord, Round]]:
    """Return each call's part of the log. The last call may have none: it was cut off before its observation was sent."""
    num_found = [0] * MAX_SEQUENCES
    calls: list[tuple[CallRecord, Round]] = []
    for record in records:
        rounds = log.sequences[record.sequence].rounds if record.sequence < len(log.sequences) else []
        place = num_found[record.sequence]
        num_found[record.sequence] += 1
        if place < len(rounds):
            calls.append((record, rounds[place]))
        elif record is not records[-1]:
            raise EpisodeFailed(f"call {record.ordinal} of the journal has no tokens, and is not the last one")
    if len(calls) != sum(len(each.rounds) for each in log.sequences):
        raise EpisodeFailed(f"the journal lists {len(calls)} calls that do not match the tokens")
    return calls
