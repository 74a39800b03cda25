"""Hand-written kernels: the tile table of ``attention.tile_table`` drives them on accelerators."""
