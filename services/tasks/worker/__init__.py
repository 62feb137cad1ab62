"""The process that runs an agent's own code. Standard library only, Python 3.10 or later: it is started by the path of
``main.py`` under any Python, which need not have this package. So its modules import each other relatively.

``reward_value`` says what a reward is, for reward functions and services too: it is here because this process needs it."""
