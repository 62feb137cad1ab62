"""Everything that users import for their tasks: environments, agents, a judge, integrations of other projects.

The algorithm never imports this package. A worker loads it by its path under any Python, which need not have the packages
that ``gspo.tasks.environments`` and ``gspo.tasks.judge`` need; so nothing is imported here.
"""
