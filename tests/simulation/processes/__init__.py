"""The three processes of a run as their entry points wire them, on the simulated network, engine and trainer."""
