"""Programs that run in a computer's sandbox, before and after a command. Nothing imports them."""
