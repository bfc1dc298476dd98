"""The guard: decides what to do about a loss or gradient norm that spikes or is not finite.

The decisions are continue, skip, roll back, or stop. They are pure functions of numbers; `recovery` carries them out.
"""
