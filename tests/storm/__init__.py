"""A storm over a whole run: everything that can go wrong, at once, for as long as asked.

python -m tests.storm --minutes 60 (`make test-storm`). ``weather`` kills, suspends, fills the disk and flips bits;
``hostile`` is an admitted peer that attacks; ``measure`` decides whether the run stood it.
"""
