"""``patchctl demo``: the whole story on one machine, with a real model and real traffic."""
