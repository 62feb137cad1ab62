"""Environments, rewards, agents of users and their worker processes, the sandbox."""
