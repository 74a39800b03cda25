"""The worked example of the README: a variant in one file, one line and one config."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import attention

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks() -> list[str]:
    section = README.partition("## Adding a variant")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


def test_the_worked_example_of_a_variant_works(tmp_path, monkeypatch):
    variant, line, config = blocks()
    (tmp_path / "far_variant.py").write_text(variant)
    (tmp_path / "far_config.py").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    import far_config
    import far_variant

    assert re.fullmatch(r'VARIANTS\["far"\] = Far\s*', line)
    monkeypatch.setitem(attention.VARIANTS, "far", far_variant.Far)
    from training.resolve import resolve
    from training.settings import settings

    found = settings(resolve(far_config.get_config().to_dict()))
    assert found.model.layers == (far_variant.Far(gap=2),)
    i, j = np.arange(7)[:, None], np.arange(7)[None]
    assert np.array_equal(found.model.layers[0].mask()(i, j), (j <= i) & ((i - j > 2) | (i == j)))
    model = found.model.build(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)
    whole, _ = model(tokens)
    changed, _ = model(tokens.at[:, 5].add(1) % 64)
    assert np.array_equal(whole[:, :5], changed[:, :5])
    assert jnp.isfinite(whole).all()
