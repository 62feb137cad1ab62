"""The agents that are written with frameworks, and a task for them."""

EXAMPLES = ["examples.openai_agents_agent:solve", "examples.langgraph_agent:solve"]
TASK = {"question": "fig*7", "prices": {"fig": 31, "hat": 90}, "answer": "217"}
