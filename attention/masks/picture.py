"""Pictures of masks: as text, as a map of tiles, and as a PNG."""

from __future__ import annotations

import numpy as np

from attention.masks.values import FULL, PARTIAL, Mask

_TILE_MARKS = np.array(["·", "▒", "█"])


def elements(mask: Mask, num_queries: int, num_keys: int | None = None) -> np.ndarray:
    """The mask as a boolean array (num_queries, num_keys); queries stand at the last keys."""
    num_keys = num_queries if num_keys is None else num_keys
    q_index = np.arange(num_queries)[:, None] + num_keys - num_queries
    return np.asarray(mask(q_index, np.arange(num_keys)))


def as_text(mask: Mask, num_queries: int, num_keys: int | None = None) -> str:
    """One row a query, one column a key: ``■`` where the query sees the key."""
    grid = elements(mask, num_queries, num_keys)
    return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in grid)


def tiles(mask: Mask, length: int, tile: int) -> np.ndarray:
    """Kinds of the tiles of a length × length square, from the structure alone."""
    lo = np.arange(0, length, tile)
    hi = np.minimum(lo + tile, length)
    return mask.tile_kinds(lo[:, None], hi[:, None], lo, hi)


def tile_map(mask: Mask, length: int, tile: int) -> str:
    """The tiles as text: ``·`` empty, never visited; ``▒`` partial; ``█`` full, no mask needed."""
    return "\n".join(" ".join(row) for row in _TILE_MARKS[tiles(mask, length, tile)])


def work(mask: Mask, length: int, tile: int) -> dict[str, float]:
    """Shares of the length × length pairs: those visible, and those in tiles that are visited."""
    kinds = tiles(mask, length, tile)
    sizes = np.minimum(np.arange(0, length, tile) + tile, length) - np.arange(0, length, tile)
    areas = sizes[:, None] * sizes
    return {
        "pairs": mask.count(length) / length**2,
        "tiles": float(areas[kinds >= PARTIAL].sum()) / length**2,
        "full_tiles": float(areas[kinds == FULL].sum()) / length**2,
    }


def save_png(mask: Mask, num_queries: int, num_keys: int | None, path: str) -> None:
    """Draws the mask with queries downwards and keys to the right."""
    from matplotlib.figure import Figure

    grid = elements(mask, num_queries, num_keys)
    figure = Figure(figsize=(5, 5 * max(grid.shape[0] / grid.shape[1], 0.3) + 0.6))
    axes = figure.add_subplot()
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="equal")
    axes.set(xlabel="key position", ylabel="query position", title=str(mask))
    axes.title.set_fontsize(9)
    if max(grid.shape) <= 40:
        axes.set_xticks(np.arange(-0.5, grid.shape[1]), minor=True)
        axes.set_yticks(np.arange(-0.5, grid.shape[0]), minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
