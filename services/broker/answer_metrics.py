"""Prometheus metrics of the last batch's answers: how they were sampled, how long they are, how hard their tasks were."""

import math
from typing import Final

from prometheus_client import CollectorRegistry

from gspo_services.broker.ledger import DIFFICULTIES, sampling_line
from gspo_services.broker.rows import BatchRow
from gspo_services.shared.runtime.process_metrics import MetricTable, gauge

LIMITS: Final = {"turn": "sampling/max_turn_tokens", "sequence": "sampling/max_tokens"}


class AnswerMetrics(MetricTable):
    """Registered once in ``registry``; NaN before the first batch, and for a difficulty without tasks in the last one."""

    prefix = "gspo_broker_"
    tokens = gauge("answer_tokens", "Sampled tokens of the last batch's trajectories: mean, 95 % and longest", "statistic")
    cut_off = gauge("answers_cut_off_ratio", "Share of the last batch's trajectories that a limit on tokens ended")
    pass_rate = gauge(
        "pass_rate_ratio", "Share of the last batch with a positive reward, by how its tasks did before", "difficulty"
    )
    temperature = gauge("sampling_temperature", "Mean temperature of the last batch's groups")
    limits = gauge("sampling_limit_tokens", "Largest limits of the last batch's groups: of a turn, of a sequence", "limit")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        tokens = [self.tokens.labels(statistic) for statistic in ("mean", "p95", "longest")]
        rates = [self.pass_rate.labels(difficulty) for difficulty in DIFFICULTIES]
        for unknown in (self.cut_off, self.temperature, *tokens, *rates, *(self.limits.labels(limit) for limit in LIMITS)):
            unknown.set(math.nan)

    def observe(self, batch: BatchRow) -> None:
        """Set the metrics from ``batch``, the newest one."""
        lengths = batch.stats.lengths
        for statistic, tokens in (("mean", lengths.mean), ("p95", lengths.p95), ("longest", lengths.max)):
            self.tokens.labels(statistic).set(tokens)
        self.cut_off.set(lengths.cut_off)
        for difficulty in DIFFICULTIES:
            self.pass_rate.labels(difficulty).set(batch.stats.pass_rates.get(difficulty, math.nan))
        line = sampling_line(batch)
        self.temperature.set(line["sampling/temperature"])
        for limit, name in LIMITS.items():
            self.limits.labels(limit).set(line[name])
