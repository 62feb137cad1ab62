"""A judge for rewards: a model behind an OpenAI-compatible API, asked with retries, limits and a cache.

    from gspo.tasks.judge import Judge

    judge = Judge("gpt-5-mini", folder="runs/judge", requests_per_minute=500)

    async def reward(completion, task):
        return float(await judge.ask([{"role": "user", "content": f"Rate from 0 to 1: {completion}"}]))

Needs the package ``openai`` (``pip install 'gspo[judge]'``).
"""

from gspo.extras import needs_extras

with needs_extras(__name__, "judge"):
    from gspo.tasks.judge.connection import JudgeError
    from gspo.tasks.judge.judge import Judge

__all__ = ["Judge", "JudgeError"]
