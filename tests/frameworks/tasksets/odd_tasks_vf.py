"""Tasks for verifiers that do what tasks of users do: tools, a partner in the conversation, and mistakes."""

import verifiers.v1 as vf
from shelf_vf import ShelfToolset

__all__ = ["OddEnv", "OddTaskset"]


class OddData(vf.TaskData):
    kind: str


class OddConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class OddTask(vf.Task[OddData, vf.State, OddConfig]):
    @classmethod
    def toolsets(cls, config: OddConfig) -> list[vf.Toolset]:
        return [ShelfToolset(config.tools)]

    def hooks(self, attr: str) -> list:
        """Of the rewards, the one of this kind of task."""
        wanted = {"tools": "says_the_price", "fixed": "says_the_price", "raises": "raises"}.get(self.data.kind)
        return [hook for hook in super().hooks(attr) if attr != "reward" or hook.__name__ == wanted]

    @vf.reward
    async def says_the_price(self, trace: vf.Trace) -> float:
        return float("4.20" in trace.last_reply)

    @vf.reward
    async def raises(self, trace: vf.Trace) -> float:
        raise KeyError("the environment's own mistake")


class OddTasksetConfig(vf.TasksetConfig):
    task: OddConfig = OddConfig()


class OddTaskset(vf.Taskset[OddTask, OddTasksetConfig]):
    def load(self) -> list[OddTask]:
        data = OddData(prompt="Go on.", system_prompt="You sell things.", kind="tools")
        return [OddTask(data, self.config.task)]


class OddEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):
    async def run(self, task: OddTask, agents: vf.Agents) -> None:
        agents.agent.trainable = task.data.kind != "fixed"
        if task.data.kind != "talk":
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as interaction:
            turns = 0
            while turns < 3:
                await interaction.turn(f"say {turns}")
                turns += 1
        interaction.trace.record_reward("turns", turns)
