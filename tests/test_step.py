"""The first state and its seeds (case E3), and what an untrained model knows (case E1)."""

import jax
import numpy as np
import pytest

from configs import gqa, linear, mla
from tasks import evaluation_key, train_key
from tests import tiny
from tests.attending import OPTIMISED
from tests.states import bits
from training import step
from training.resolve import resolve
from training.settings import settings

SETTINGS = settings(tiny.config())


def test_seeds_decide_parameters_and_batches_and_nothing_else_does():
    drawn = {}
    for seed in (0, 1):
        chosen = settings(tiny.config(seed=seed))
        drawn[seed] = step.init_state(chosen)
        again = step.init_state(chosen)
        assert bits(again) == bits(drawn[seed])
    assert not np.array_equal(jax.random.key_data(drawn[0].key), jax.random.key_data(drawn[1].key))
    for name, value in drawn[0].params.items():
        if name.rsplit("/", 1)[-1].startswith("w_"):
            assert not np.any(value == drawn[1].params[name])
    other = settings(tiny.config(train__data_seed=1))
    same = step.init_state(other)
    assert bits(same) != bits(drawn[0])  # dropout
    assert all(np.array_equal(same.params[k], drawn[0].params[k]) for k in same.params)

    sample = jax.jit(lambda key: SETTINGS.task.sample(key, 4).tokens_BT)
    batches = [sample(train_key(seed, index)) for seed in (0, 1) for index in (0, 1, 2)]
    batches += [sample(evaluation_key(seed, index)) for seed in (0, 1) for index in (0, 1)]
    assert len({np.asarray(batch).tobytes() for batch in batches}) == len(batches)


@pytest.mark.broad
@pytest.mark.parametrize("config", [gqa, mla, linear], ids=lambda config: config.__name__)
def test_compiling_the_first_state_in_less_time_changes_no_bit(config, monkeypatch):
    """Published runs start from these; without any optimisation a few bits differ."""
    chosen = settings(resolve(config.get_config().to_dict(), {}))
    ours = bits(step.init_state(chosen))
    monkeypatch.setattr(step, "RUN_ONCE", OPTIMISED)
    assert bits(step.init_state(chosen)) == ours
    monkeypatch.setattr(step, "RUN_ONCE", {"xla_backend_optimization_level": 0})
    assert bits(step.init_state(chosen)) != ours


@pytest.mark.parametrize("tied_head", [False, True])
def test_an_untrained_model_is_about_as_good_as_chance(tied_head):
    """Case E1 (b): 16 symbols; more than a sixteenth would mean that the answer can be seen."""
    chosen = settings(
        tiny.config(
            task__vocab_size=20, task__length=32, model__num_layers=2, eval__batch_size=256,
            model__tied_head=tied_head,
        )
    )  # fmt: skip
    params = step.init_state(chosen).params
    for counts in step.make_evaluation(chosen)(params).values():
        assert int(counts.answers) > 2000
        assert counts.ratios()["accuracy"] < 1 / 16 + 0.03
