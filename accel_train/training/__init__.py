"""The training loop, and what comes before and after it; read `loop.py` first.

What a step is made of lives in `engine`."""
