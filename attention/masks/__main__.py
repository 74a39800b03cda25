"""Draws a mask: ``python -m attention.masks "Causal() & (Window(4) | First(1))" --length=12``."""

from __future__ import annotations

import argparse

from attention.masks import expression, picture

_LONGEST = 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attention.masks", description=__doc__)
    parser.add_argument("mask", help="an expression such as 'Causal() & Window(4)'")
    parser.add_argument("--length", type=int, default=16, help="positions, queries and keys alike")
    parser.add_argument("--tile", type=int, default=4, help="edge of a tile, in positions")
    parser.add_argument("--png", help="also save the picture to this file")
    options = parser.parse_args()
    for name in ("length", "tile"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.length > _LONGEST:
        parser.error(f"--length must be at most {_LONGEST} to be drawn, got {options.length}")
    if options.png is not None and not options.png.endswith(".png"):
        parser.error(f"--png must name a file that ends in .png, got {options.png}")
    try:
        mask = expression.parse(options.mask)
        drawing = mask.draw(options.length, path=options.png)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--png={options.png}: {error.strerror}")
    print(drawing)
    print(f"\ntiles of {options.tile} × {options.tile} (· empty, ▒ partial, █ full):")
    print(picture.tile_map(mask, options.length, options.tile))
    work = picture.work(mask, options.length, options.tile)
    print(
        f"\n{work['pairs']:.1%} of the pairs are visible; tiles visited hold {work['tiles']:.1%} "
        f"of the work ({work['full_tiles']:.1%} in full tiles, which need no mask)"
    )
    if mask.causal_from() is None:
        print("no cache can serve it: queries see later keys; combine it with Causal() &")
        return
    retention = mask.retention()
    kept = "all past keys" if retention.last is None else f"the last {retention.last} of the keys"
    pinned = f" and positions {list(retention.pinned)}" if retention.pinned else ""
    print(f"a cache keeps {kept}{pinned}")


if __name__ == "__main__":
    main()
