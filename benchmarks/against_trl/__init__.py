"""How long this project and TRL take to the same held-out reward, from the same model, on the same machine."""
