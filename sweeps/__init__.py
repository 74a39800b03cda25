"""Sweeps: many runs from one description, compared fairly and reported.

Data flows one way: ``study`` (what to compare) → ``plan`` (every run, checked) → ``drive`` (an
executor trains them, each in a process of its own) → ``results`` (one file a run) → ``report``.
Nothing below imports this room; studies in ``configs/sweeps`` import ``axes``, ``study``,
``fairness``, ``measures``, ``verdicts`` and ``pictures``.
"""
