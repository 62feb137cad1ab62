"""The rollout process: leases in, trajectories out, on its own SGLang server."""
