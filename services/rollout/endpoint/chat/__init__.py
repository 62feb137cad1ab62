"""OpenAI's chat completions: requests read, answers written."""
