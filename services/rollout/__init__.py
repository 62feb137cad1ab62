"""The rollout process: leases in, trajectories out, on an SGLang server of its own."""
