"""The benchmark: how fast the lane is beside its peers and its limits, measured in one run: `python -m tests.bench`.

Read in this order: figures.py (what must be reached), results.py, machine.py, brain.py, stand.py, clients.py, then the
sections control.py, gap.py, rows.py, command.py, memory.py, serial.py (slots.py), call.py and peers.py with
contest.py; table.py renders.

Absolute figures move by a factor of two between runs and machines, so nothing is judged by one: each is set beside
another figure of the same run.
"""
