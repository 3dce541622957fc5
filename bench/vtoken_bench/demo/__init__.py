"""``vtoken demo``: a real model's run recorded once, its KV replayed through every executor in every variant."""
