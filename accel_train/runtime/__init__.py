"""The life of a process: start, signals, heartbeats, hang detection, memory, exit, and checks of the machine.

Code in this package does not depend on the task or the model.
"""
