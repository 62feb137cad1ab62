"""A storm over whole runs: everything that can go wrong, at once, for as long as asked.

python -m tests.storm --minutes 60 (`make test-storm`). ``parts`` has its runs, ``weather`` kills, suspends, fills disks,
flips bits and cuts the broker off. ``hostile`` is an admitted peer that attacks, ``attacker`` an agent that does.
``verdict`` decides whether the run stood it.
"""
