"""``gspo sandbox``: sandboxes of this machine for rollouts on others."""
