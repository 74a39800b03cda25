"""Configurations: ``base.py`` has every option once, the others are diffs from it."""
