"""The life of a process: start, signals, heartbeat, hang detection, memory, exit, and what machine it is on.

Nothing here knows what is trained."""
