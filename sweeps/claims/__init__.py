"""The table of claims as one page: every row with its evidence, run again and judged.

Data flows one way: ``rows`` (claims and their evidence) → ``drive`` (each piece of evidence in
processes of its own) → ``record`` (one file each) → ``judge`` → ``page``. ``evidence`` has a class
for each kind of evidence; ``command`` is what sweep.py calls.
"""
