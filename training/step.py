"""The training step and the evaluation, as pure compiled functions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import pure
from tasks import Batch, Mixture, Task, dropout_key, evaluation_key, init_key, train_key
from training import optimizer as optimizers
from training.metrics import Counts
from training.objective import mean_loss
from training.settings import Settings
from training.state import TrainState

# On the CPU: as much optimisation as gives the same bits in a third of the time to compile.
RUN_ONCE = {"xla_backend_optimization_level": 1}


def init_state(settings: Settings) -> TrainState:
    """The state before the first step, a function of the seeds; one program serves them all."""
    options = RUN_ONCE if jax.default_backend() == "cpu" else None
    initial = jax.jit(functools.partial(_initial, settings), compiler_options=options)
    return initial(jnp.uint32(settings.init_seed), jnp.uint32(settings.train_seed))


def state_shapes(settings: Settings) -> TrainState:
    """Shapes and dtypes of ``init_state``, without compiling it."""
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    return jax.eval_shape(functools.partial(_initial, settings), seed, seed)


def _initial(settings: Settings, init_seed: jax.Array, train_seed: jax.Array) -> TrainState:
    model = settings.model.build(nnx.Rngs(init_key(init_seed)))
    _, params = pure.split(model)
    transformation = optimizers.optimizer(settings.optimizer, settings.train.steps)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=transformation.init(params),
        key=dropout_key(train_seed),
    )


def graph_of(settings: Settings) -> nnx.GraphDef:
    """Structure of the model, without allocating its parameters."""
    return pure.graph_of(settings.model)


def make_step(settings: Settings, train_seed: int | jax.Array, learning_rate: float | jax.Array):
    """``step(state) → (state, {"loss", "gradient_norm"})``: one optimizer step, to be compiled.

    Args:
      settings: of the run; its seeds and its learning rate are not read here.
      train_seed: of batches; it may be traced.
      learning_rate: the highest of the schedule; it may be traced.
    """
    graph, task = graph_of(settings), settings.task
    transformation = optimizers.optimizer(settings.optimizer, settings.train.steps, learning_rate)

    def step(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        data_key = train_key(train_seed, state.step)
        batch = task.sample(data_key, settings.train.batch_size)

        def loss_of(params):
            return mean_loss(
                settings.objective,
                pure.merge(graph, params),
                batch,
                settings.train.loss_on,
                mask_key=_mask_key(data_key),
                dropout_key=jax.random.fold_in(state.key, state.step),
            )

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, state.key)
        return new, {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}

    return step


def make_interval(settings: Settings):
    """``interval(state, until) → (state, history)``: the steps up to ``until``, at most log_every.

    One program serves every interval, the shorter ones too: the loop has a fixed length and the
    steps past ``until`` are skipped. The state is donated. ``history`` holds ``loss`` (nats) and
    ``gradient_norm`` of each step in turn, NaN-free where a step was skipped (0).

    Seed and learning rate are arguments of the program and not constants in it: runs that differ in
    nothing else find it in the compilation cache.
    """

    def skip(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        return state, {"loss": jnp.float32(0), "gradient_norm": jnp.float32(0)}

    @functools.partial(jax.jit, donate_argnums=0)
    def interval(state: TrainState, until: jax.Array, train_seed, learning_rate):
        step = make_step(settings, train_seed, learning_rate)
        return jax.lax.scan(
            lambda state, _: jax.lax.cond(state.step < until, step, skip, state),
            state,
            length=settings.train.log_every,
        )

    return functools.partial(
        interval,
        train_seed=jnp.uint32(settings.train_seed),
        learning_rate=jnp.float32(settings.optimizer.learning_rate),
    )


def make_evaluation(settings: Settings):
    """``evaluate(params) → {task name: Counts}`` on the fixed evaluation stream of every task."""
    graph = graph_of(settings)

    @jax.jit
    def evaluate(params) -> dict[str, Counts]:
        model = pure.merge(graph, params)
        return {task.name: count_task(model, task, settings) for task in settings.evaluated}

    return evaluate


def count_task(model, task: Task | Mixture, settings: Settings) -> Counts:
    """Teacher-forced counts over the evaluation batches of one task."""

    def one(total: Counts, index: jax.Array) -> tuple[Counts, None]:
        key = evaluation_key(settings.eval.seed, index)
        batch = task.sample(key, settings.eval.batch_size)
        return total + count_batch(model, batch, key, task.chance, settings.objective), None

    return jax.lax.scan(one, Counts.zero(), jnp.arange(settings.eval.batches))[0]


def count_batch(model, batch: Batch, key: jax.Array, chance: float, objective) -> Counts:
    """Counts of one batch that was drawn with ``key``, under the objective."""
    batch = objective.prepare(batch, _mask_key(key))
    return Counts.of(objective.logits(model, batch, None), batch, chance)


def _mask_key(data_key: jax.Array) -> jax.Array:
    """A key for masking that has nothing to do with what the batch was drawn from."""
    return jax.random.fold_in(data_key, 2**32 - 1)
