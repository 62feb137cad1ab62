"""Anthropic's messages: requests read, answers written."""
