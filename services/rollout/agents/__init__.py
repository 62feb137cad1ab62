"""Agents of users as the rollout runs them: each episode has a key at the endpoint, and ends with its agent's reward."""

from gspo_services.rollout.agents.opening import open_agents, open_solver
from gspo_services.rollout.agents.runner import AgentEpisodes, AgentTerms, Solve

__all__ = ["AgentEpisodes", "AgentTerms", "Solve", "open_agents", "open_solver"]
