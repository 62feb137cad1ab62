"""The OpenAI-compatible endpoint of a rollout: an agent's model calls, one key for each episode."""
