"""How long a batch and a version take, and what that means for max_lag."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import ReadModel, Situation
from gspo_services.shared.estimates import RunPace, Span, Work, engine_memory, pace_of, roofline, version_span, work_of


def speed_findings(situation: Situation, model: ReadModel, prompt_tokens: float) -> Iterator[Finding]:
    """Nothing for a model of unknown shape; a note for hardware of unknown speed."""
    if model.shape is None:
        return
    settings = situation.settings
    active = 0 if model.teacher is None else model.teacher.active_parameters
    work = work_of(settings, prompt_tokens, active)
    rollouts = max(1, situation.num_rollouts)
    pace = None
    if not situation.has_unknown_hardware:
        device = situation.hardware.device
        room = engine_memory(model.shape, settings, device.memory_bytes if device else None).running(work.sequence_tokens)
        pace = pace_of(model.shape, settings, situation.hardware, work, rollouts, room)
    if pace is None:
        yield _estimated("speed", "note", "not estimated for unknown hardware; --gpu NAME --gpus N names it")
        return
    answers = f"with answers of {work.turn_tokens:.0f} tokens (half of their limit) and prompts of {prompt_tokens:.0f}"
    yield _estimated(
        "speed", "ok",
        f"{rollouts} rollouts sample {pace.sampled.rate}, {situation.num_ranks} ranks train {pace.trained.rate}, {answers}",
    )  # fmt: skip
    yield from _least_time(situation, model, work)
    yield _balance(situation, pace)
    version = version_span(model.shape, settings, cores=situation.hardware.cores, num_rollouts=rollouts)
    yield _lag(situation, pace, version)


def _least_time(situation: Situation, model: ReadModel, work: Work) -> Iterator[Finding]:
    """What bounds training where several GPUs train together."""
    device = situation.hardware.device
    if device is None or model.shape is None or situation.num_ranks == 1:
        return
    least = roofline(model.shape, situation.settings, work, device)
    if least is not None:
        yield _estimated(
            "least time", "ok",
            f"a micro-batch of {least.tokens:,} tokens: operations {least.operations:.2g} s, weights and gradients "
            f"{least.ring:.2g} s, tokens between ranks {least.exchanged:.2g} s at published rates, bound by {least.bound}; "
            f"once a step {least.of_step:.2g} s; at most {least.tokens_per_s:,.0f} tokens/s a rank, MFU {least.mfu:.0%}",
        )  # fmt: skip


def _estimated(check: str, status: str, text: str, way_out: str = "") -> Finding:
    assert status in ("ok", "note", "warn")
    return Finding(check=check, status=status, text=text, way_out=way_out, basis="estimated")  # type: ignore[arg-type]


def _balance(situation: Situation, pace: RunPace) -> Finding:
    whole = pace.batch_s * situation.settings.run.num_batches
    text = f"generation {pace.generation_s.seconds}, training {pace.training_s.seconds} a batch; the run {_duration(whole)}"
    if situation.settings.batch.max_lag == 0:
        text = (
            f"generation {pace.generation_s.seconds}, then training {pace.training_s.seconds} a batch: max_lag 0 takes turns"
        )
    if pace.generation_s.low > 2 * pace.training_s.high:
        return _estimated("time", "note", f"{text}. The learner will wait: more rollouts help, more ranks do not")
    if pace.training_s.low > 2 * pace.generation_s.high:
        return _estimated("time", "note", f"{text}. The rollouts will wait: more ranks help, more rollouts do not")
    return _estimated("time", "ok", text)


def _duration(span: Span) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if span.low > 2 * size:
            return f"{span.low / size:.2g} to {span.high / size:.2g} {unit}"
    return span.seconds


def lag_span(pace: RunPace, version: Span) -> Span:
    """How many versions pass while one reaches the engines and the longest answer is sampled under it.

    Generation and the batch depend on the same speed, so their bounds go together; versions have a speed of their own.
    """
    batch = pace.batch_s
    episode = sorted((pace.episode_s.low / batch.low, pace.episode_s.high / batch.high))
    return Span(episode[0] + version.low / batch.high, episode[1] + version.high / batch.low)


def _lag(situation: Situation, pace: RunPace, version: Span) -> Finding:
    """Admission starts no group that would become too old, so what does not fit into max_lag is waiting."""
    most = situation.settings.batch.max_lag
    lag = lag_span(pace, version)
    text = (
        f"a version takes {version.seconds} to serve, the longest answer {pace.episode_s.seconds}: {lag.low:.1f} to "
        f"{lag.high:.1f} versions; batch.max_lag is {most}"
    )
    if most == 0:
        return _estimated("lag", "ok", f"a version takes {version.seconds}, in which nothing is sampled: batch.max_lag is 0")
    if lag.low > most:
        return _estimated(
            "lag", "warn", f"{text}: generation will wait for it",
            f"raise batch.max_lag to {int(lag.low) + 1}, or batch.groups_per_batch, or lower sampling.max_turn_tokens",
        )  # fmt: skip
    return _estimated(
        "lag", "ok" if lag.high <= most else "note", text + ("" if lag.high <= most else ": may wait at times")
    )
