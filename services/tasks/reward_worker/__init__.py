"""The process that computes rewards for a rollout. It imports little: it runs code of users on text of models."""
