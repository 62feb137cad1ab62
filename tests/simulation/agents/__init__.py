"""Agents in virtual time: the real episodes of agents, with doubles of the chat format, the endpoint and the user's code."""
