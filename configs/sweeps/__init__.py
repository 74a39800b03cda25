"""Studies: each file has the base config of its runs and what is compared."""
