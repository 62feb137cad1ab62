"""Sums for verifiers: "12+7=" is to be answered by "19". Nothing in this file knows who trains on it."""

import random

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def a_number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdecimal())


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 2500
    max_operand: int = 49
    seed: int = 0


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        config = self.config
        pairs = [(one, other) for one in range(config.max_operand + 1) for other in range(config.max_operand + 1)]
        random.Random(config.seed).shuffle(pairs)
        return [
            SumsTask(SumsData(prompt=f"{one}+{other}=", answer=str(one + other)), config.task)
            for one, other in pairs[: config.num_tasks]
        ]
