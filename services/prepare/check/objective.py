"""Checks of the objective against type, lengths and learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gspo.settings import Objective
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.model import count
from gspo_services.prepare.check.situation import ReadModel, Situation
from gspo_services.shared.settings import Scheduled, critical_batches
from gspo_services.shared.weights import ServedError, reported_experts

BFLOAT16_TOKEN_NOISE: Final = 0.023
"""Mean deviation of a token's log-prob in bfloat16: docs/guide/learner.md, "bfloat16"."""
BFLOAT16_SEQUENCE_NOISE: Final = 0.0024
BFLOAT16_SEQUENCE_TOKENS: Final = 511
"""There the mean log-ratio of 511 tokens is off by 0.0024."""
FEW_TOKENS: Final = 32
LARGE: Final = 50_000_000
HIGH_RATE: Final = 5e-5
LOW_RATE: Final = 1e-5
SMALL: Final = 5_000_000
LOWEST_LORA_RATE: Final = 3e-6
HIGHEST_LORA_RATE: Final = 1e-2


def objective_findings(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """The clip range against noise, caps against lengths, the learning rate against the model's size."""
    settings = situation.settings
    objective, learner = settings.objective, settings.learner
    noise = _noise(settings.sampling.max_turn_tokens / 2)
    clip = max(objective.eps_low, objective.eps_high)
    text = f"{objective.anchor} anchor, {objective.ratio_unit} ratios, {_surrogate(objective)}"
    measures_noise = objective.anchor == "behaviour" and objective.noise_z > 0
    if learner.dtype == "bfloat16" and not measures_noise and objective.ratio_unit != "token" and noise > clip:
        if objective.adaptive_clip_target is None:
            yield Finding(
                check="objective", status="warn", basis="estimated",
                text=f"{text}: in bfloat16 rounding alone moves a sequence's mean log-ratio by some {noise:.1g}: more",
                way_out='set objective.anchor = "behaviour", whose clip range is widened by the measured noise, or '
                'objective.adaptive_clip_target = 0.15, or learner.dtype = "float32"; watch log_ratio_error',
            )  # fmt: skip
        else:
            yield Finding(check="objective", status="ok", text=f"{text}, steered by adaptive_clip_target")
    else:
        yield Finding(check="objective", status="ok", text=text)
    yield from _caps(situation)
    yield from _types(situation)
    yield from _experts(situation, model)
    yield from _rate(situation, model)


def _surrogate(objective: Objective) -> str:
    """What stands in the place of the clip, with the numbers that it uses."""
    name, clip = objective.surrogate, f"eps {objective.eps_low:g} / {objective.eps_high:g}"
    numbers = {
        "clip": clip,
        "cispo": f"cispo, weights up to {objective.cispo_cap:g}",
        "sapo": f"sapo, temperatures {objective.sapo_tau_positive:g} / {objective.sapo_tau_negative:g}",
        "dppo": f"dppo, probabilities within {objective.dppo_bound:g}, ratios up to {objective.dppo_cap:g}",
        "m2po": f"m2po, second moment up to {objective.m2po_bound:g}",
        "m2po_clip": f"m2po_clip, second moment up to {objective.m2po_bound:g} beyond {clip}",
        "vespo": "vespo",
        "gmpo": f"gmpo, {clip}",
    }
    by_ess = ", learning rate by effective sample size" if objective.learning_rate_by_ess else ""
    masks = objective.weight_mode == "reject_tokens"
    mask = f", tokens masked outside {objective.tis_token_floor:g} to {objective.tis_token_cap:g}" if masks else ""
    return numbers[name] + mask + by_ess


def _noise(tokens: float) -> float:
    """Of a mean over so many tokens in bfloat16: tokens deviate together, so it falls slower than 1/sqrt(n).

    The power goes through both measured points: 0.023 for one token, 0.0024 for 511.
    """
    power = 0.36  # log(0.023 / 0.0024) / log(511)
    return float(BFLOAT16_TOKEN_NOISE / max(1.0, tokens) ** power)


def _caps(situation: Situation) -> Iterator[Finding]:
    objective, sampling = situation.settings.objective, situation.settings.sampling
    weighs = objective.anchor == "proximal" and objective.tis_mode in (None, "truncate", "reject")
    if weighs and sampling.max_turn_tokens <= FEW_TOKENS and objective.tis_cap < 1.5:
        yield Finding(
            check="tis cap", status="warn",
            text=f"objective.tis_cap is {objective.tis_cap:g} and answers have at most "
            f"{sampling.max_turn_tokens} tokens, whose mean is noisy",
            way_out="set objective.tis_cap = 2.0",
        )  # fmt: skip


def _types(situation: Situation) -> Iterator[Finding]:
    settings = situation.settings
    served, trained = settings.model.dtype, settings.learner.dtype
    if served == trained:
        return
    if trained == "bfloat16":
        yield Finding(
            check="types", status="warn", text="learner.dtype is bfloat16, model.dtype is float32: twice the bytes, no gain",
            way_out='set model.dtype = "bfloat16", too',
        )  # fmt: skip
    else:
        yield Finding(
            check="types", status="note", text="engines serve bfloat16 of a float32 learner: the mismatch factor corrects it"
        )
    if situation.hardware.device is not None and trained == "float32":
        yield Finding(check="types", status="note", text="learner.dtype float32 leaves a GPU's tensor cores idle")


def _experts(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """Whether an engine can report its choices of experts, and their bytes, which otherwise nobody sees before the ledger
    has grown. Of a model without experts there is another finding."""
    settings, shape = situation.settings, model.shape
    if settings.objective.routing_replay_from != "engine" or not model.config or (shape is not None and not shape.experts):
        return
    try:
        each = reported_experts(model.config).token_bytes
    except ServedError as error:
        text, _, way_out = str(error).rpartition("; ")
        yield Finding(check="experts", status="fail", text=text, way_out=way_out)
        return
    tokens = settings.batch.groups_per_batch * settings.batch.group_size * settings.sampling.max_tokens
    yield Finding(
        check="experts", status="note", basis="estimated",
        text=f"objective.routing_replay_from is engine: {each} bytes a sampled token on the wire and in the ledger, "
        f"{each * tokens / 2**20:,.3g} MiB a batch at most, where ids and log-probs take 8 a token",
    )  # fmt: skip


def _rate(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    settings, shape = situation.settings, model.shape
    if shape is None:
        return
    rate, batch = max((Scheduled.of(settings, batch).learning_rate, -batch) for batch in critical_batches(settings))
    where = f" in batch {-batch}" if settings.schedule.learning_rate is not None else ""
    if settings.lora.is_used:
        yield _rate_of_adapters(rate, where)
        return
    text = f"learner.learning_rate is {rate:g}{where} for {count(shape.parameters)} parameters"
    if shape.parameters > LARGE and rate > HIGH_RATE:
        yield Finding(
            check="learning rate", status="warn", text=f"{text}: far above what is usual",
            way_out="1e-6 is usual for models of billions of parameters, 1e-5 for tens of millions",
        )  # fmt: skip
    elif shape.parameters < SMALL and rate < LOW_RATE:
        yield Finding(
            check="learning rate",
            status="warn",
            text=f"{text}: so small a model hardly moves",
            way_out="2e-4 trains the examples",
        )
    else:
        yield Finding(check="learning rate", status="ok", text=text)


def _rate_of_adapters(rate: float, where: str) -> Finding:
    text = f"learner.learning_rate is {rate:g}{where} for adapters"
    way_out = "ten times the rate for all weights is usual: 1e-5 to 1e-4 for large models, 2e-3 trains examples/lora.toml"
    if not LOWEST_LORA_RATE <= rate <= HIGHEST_LORA_RATE:
        size = "far above" if rate > HIGHEST_LORA_RATE else "far below"
        return Finding(check="learning rate", status="warn", text=f"{text}: {size} what is usual", way_out=way_out)
    return Finding(check="learning rate", status="ok", text=text)
