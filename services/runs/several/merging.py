"""Merges the audits of the ledgers of several brokers into one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gspo_services.runs.audit import KEPT, Audit, Findings, Outcome
from gspo_services.runs.ledgers import broker_name
from gspo_services.runs.several.across import SharedHistory, audit_across


def merged(directory: Path, audits: Sequence[Audit], shares: Sequence[SharedHistory | None]) -> Audit:
    """Merge the audits of the run in ``directory``, in broker order. A batch counts once all brokers have their share."""
    findings = Findings()
    known = [share for share in shares if share is not None]
    notes = []
    if len(known) == len(shares):
        notes += audit_across(findings, known)
    else:
        unread = ", ".join(broker_name(number) for number, share in enumerate(shares) if share is None)
        notes.append(f"the brokers are not compared with each other: the ledger of {unread} cannot be read")
    for number, audit in enumerate(audits):
        for name, texts in audit.findings.texts.items():
            findings.counts[name] += audit.findings.counts[name]
            kept = findings.texts.setdefault(name, [])
            kept += [f"{broker_name(number)}: {text}" for text in texts][: KEPT - len(kept)]
        notes += [f"{broker_name(number)}: {note}" for note in audit.notes]
    return Audit(
        directory=directory,
        run_id=audits[0].run_id,
        outcomes=_outcomes(audits),
        num_batches=min(audit.num_batches for audit in audits),
        num_trained_batches=min(audit.num_trained_batches for audit in audits),
        num_trained_again=max(audit.num_trained_again for audit in audits),
        num_quarantined=max(audit.num_quarantined for audit in audits),
        num_resumed=sum(audit.num_resumed for audit in audits),
        num_versions=min(audit.num_versions for audit in audits),
        num_chunks=sum(audit.num_chunks for audit in audits),
        findings=findings,
        notes=notes,
        brokers=list(audits),
    )


def _outcomes(audits: Sequence[Audit]) -> list[Outcome]:
    total: dict[tuple[str, str, str], Outcome] = {}
    for each in (outcome for audit in audits for outcome in audit.outcomes):
        key = (each.split, each.status, each.reason)
        former = total.get(key)
        total[key] = each if former is None else replace(
            each,
            groups=former.groups + each.groups,
            trajectories=former.trajectories + each.trajectories,
            tokens=former.tokens + each.tokens,
            action_tokens=former.action_tokens + each.action_tokens,
        )  # fmt: skip
    return [total[key] for key in sorted(total)]
