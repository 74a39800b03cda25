"""The cost of a model against traced and compiled programs, and against published figures."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from analysis.cost import cost, describe, rows
from analysis.cost_presets import PRESETS
from attention import VARIANTS
from models.decoder import DecoderOptions
from models.encoder_decoder import EncoderDecoderOptions
from models.pure import merge, split
from tests import tiny
from tests.variants import options_of
from training.resolve import resolve
from training.settings import settings

ROOT = Path(__file__).resolve().parent.parent
KIB, GIB = 1024, 1024**3
D, N, K, H, V, F = 128, 4, 2, 64, 24, 96
WINDOW = {"num_kv_heads": K, "window": 9}

# One line for every variant; widths as in practice, since what is done to single numbers is not
# counted and weighs more in narrow heads.
OPTIONS = {
    "causal": {"num_kv_heads": K},
    "full": {},
    "prefix": {"prefix": 5},
    "window": WINDOW,
    "streaming": {**WINDOW, "first": 2, "smeared_keys": True},
    "longformer": {**WINDOW, "num_global": 2, "global_projections": True},
    "longformer_encoder": {**WINDOW, "num_global": 2},
    "masked": {"mask_expression": "Causal() & Window(3)"},
    "linear": {"num_kv_heads": K, "feature_map": "softmax", "smeared_keys": True},
    "mla": {"latent_rank": 48, "rope_width": 32, "query_rank": 40},
    "additive": {"num_kv_heads": K},
}
# Cross-attention is the encoder-decoder's; any other variant has the options of the contract.
OPTIONS |= {
    name: dataclasses.asdict(options_of(name)) for name in VARIANTS.keys() - OPTIONS - {"cross"}
}
KEEPS_NO_CACHE = ("full", "longformer_encoder")


def decoder(*names, options=OPTIONS, **changes) -> DecoderOptions:
    """A decoder with these variants as its pattern."""
    layers = tuple(VARIANTS[name](**options[name]) for name in names)
    sizes = {
        "vocab_size": V, "num_layers": len(names), "d_model": D, "num_heads": N, "head_width": H,
        "mlp": "none", "position": "none" if "additive" in names else "rope",
        "implementation": "auto" if set(names) <= {"linear"} else "reference",
    }  # fmt: skip
    return DecoderOptions(pattern=names, layers=layers, **{**sizes, **changes})


def encoder_decoder() -> EncoderDecoderOptions:
    fields = {
        f.name: getattr(decoder("causal"), f.name) for f in dataclasses.fields(DecoderOptions)
    }
    return EncoderDecoderOptions(
        **{**fields, "num_layers": 2, "mlp": "swiglu", "d_ff": F},
        encoder_num_layers=3,
        encoder_pattern=("full", "longformer_encoder"),
        encoder_layers=(
            VARIANTS["full"](),
            VARIANTS["longformer_encoder"](**OPTIONS["longformer"]),
        ),
        cross=VARIANTS["cross"](num_kv_heads=1),
    )


def programs(options: DecoderOptions, length: int, source_length: int):
    """Abstract parameters and tokens, the forward pass, and the gradient of a loss of it."""
    held = {}

    def build():
        held["graph"], params = split(options.build(nnx.Rngs(0)))
        return params

    def forward(params, tokens, source):
        model = merge(held["graph"], params)
        more = {"memory": model.encode(source)} if model.reads_source else {}
        return model(tokens, **more)[0]

    def loss(*arguments):
        return -jax.nn.log_softmax(forward(*arguments))[..., 0].mean()

    tokens, source = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (length, source_length))
    return (jax.eval_shape(build), tokens, source), forward, jax.grad(loss)


def products(jaxpr, per_tanh: int = 0) -> int:
    """FLOPs of the matrix products of a traced program, loops unrolled, and of every tanh."""
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        elif name == "tanh":
            total += per_tanh * math.prod(equation.outvars[0].aval.shape)
        assert name not in ("while", "cond"), "how often this runs is not known"
        times = equation.params["length"] if name == "scan" else 1
        for value in equation.params.values():
            inner_jaxpr = getattr(value, "jaxpr", value)
            if hasattr(inner_jaxpr, "eqns"):
                total += times * products(inner_jaxpr, per_tanh)
    return total


def traced(function, arguments, **options) -> int:
    return products(jax.make_jaxpr(function)(*arguments).jaxpr, **options)


def numbers(params) -> int:
    return sum(math.prod(array.shape) for array in params.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_and_flops_are_those_of_the_traced_program(name):
    T = 130  # three chunks of linear attention, the last of them ragged
    options = decoder(name)
    bill = cost(options, T)
    arguments, forward, gradient = programs(options, T, T)
    assert bill.parameters["total"] == numbers(arguments[0])
    # The additive score network is an addition, a product and a sum for each tanh.
    per_tanh = 3 if name == "additive" else 0
    # The reference adds two products a layer that look for keys which are not finite.
    assert 1 <= traced(forward, arguments, per_tanh=per_tanh) / bill.forward.computed < 1.015
    if name != "additive":  # its gradient is no matrix product
        both = bill.forward.computed + bill.backward.computed
        assert 1 <= traced(gradient, arguments) / both < 1.015
    assert bill.forward.visible <= bill.forward.computed


def test_an_encoder_decoder_with_a_longer_source():
    T, S, options = 21, 34, encoder_decoder()
    bill = cost(options, T, source_length=S)
    arguments, forward, gradient = programs(options, T, S)
    assert bill.parameters["total"] == numbers(arguments[0])
    assert 1 <= traced(forward, arguments) / bill.forward.computed < 1.015
    assert 1 <= traced(gradient, arguments) / (3 * bill.forward.computed) < 1.015
    caches = jax.eval_shape(
        lambda: nbytes_as_shape(options.build(nnx.Rngs(0)).init_caches(1, T, S))
    )
    assert bill.cache.sequence_bytes == sum(math.prod(c.shape) for c in caches)


def nbytes_as_shape(caches: list) -> list:
    """The size of every cache, as the shape of an array of bytes, for an abstract evaluation."""
    return [jnp.zeros(cache.nbytes, jnp.int8) for cache in caches]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in KEEPS_NO_CACHE])
def test_the_cache_is_what_would_be_allocated(name, dtype):
    options = decoder(name, "causal", num_layers=5, dtype=dtype)
    for length in (1, 13):
        bill = cost(decoder(name, "causal", num_layers=5), length, batch=3, dtype=dtype)

        def allocate(length=length):
            return nbytes_as_shape(options.build(nnx.Rngs(0)).init_caches(3, length))

        caches = jax.eval_shape(allocate)
        assert bill.cache.total_bytes == sum(math.prod(c.shape) for c in caches)
        assert bill.cache.total_bytes == 3 * bill.cache.sequence_bytes


@pytest.mark.parametrize("name", KEEPS_NO_CACHE)
def test_what_cannot_decode_has_no_cache(name):
    bill = cost(decoder(name), 12)
    assert bill.cache is None and bill.decode is None
    assert ("cache", "none", "later keys are seen") in rows(bill)


def decode_programs(options: DecoderOptions, length: int):
    held = {}

    def build():
        model = options.build(nnx.Rngs(0))
        held["graph"], params = split(model)
        return params, model.init_caches(1, length)

    def step(params, caches, token, position):
        return merge(held["graph"], params)(token, position, caches=caches)[0]

    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return step, (*jax.eval_shape(build), one, one)


@pytest.mark.parametrize("name", ["causal", "window", "longformer", "linear", "mla", "additive"])
def test_flops_of_a_token_are_those_of_the_traced_step(name):
    T = 40
    step, arguments = decode_programs(decoder(name), T)
    found = traced(step, arguments, per_tanh=3 if name == "additive" else 0)
    if name == "linear":  # whose state is written by 2 · K · M · E products and sums of numbers
        found += 2 * K * (2 * H) * H
    # A step computes the scores of all slots, and with global tokens those of two caches, of which
    # a later token sees one.
    bound = 1.2 if name == "longformer" else 1.015
    assert 1 <= found / cost(decoder(name), T).decode < bound


# Lengths at which no loop takes a second turn, of which XLA would count the first alone.
COMPILED = {
    "a window and swiglu": (192, decoder("window", mlp="swiglu", d_ff=512, num_layers=2)),
    "linear and grouped heads, gelu": (192, decoder(
        "linear", "causal", mlp="gelu", d_ff=512, options={**OPTIONS, "linear": {}},
    )),
    "additive": (128, decoder("additive", d_model=64, num_heads=1, options={"additive": {}})),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_against_the_compiled_program(name):
    T, options = COMPILED[name]
    bill = cost(options, T)
    arguments, forward, gradient = programs(options, T, T)
    both = bill.forward.computed + bill.backward.computed
    for function, flops, activations in (
        (forward, bill.forward.computed, bill.inference),
        (gradient, both, bill.training),
    ):
        compiled = jax.jit(function).lower(*arguments).compile()
        # XLA counts what is done to single numbers too, of which the gradient of additive scores is
        # made, and may share what is computed twice.
        bound = 1.2 if name == "additive" else 1.05
        assert 0.97 < compiled.cost_analysis()["flops"] / flops < bound
        assert 0.6 < compiled.memory_analysis().temp_size_in_bytes / activations.dense < 1.4


# Published figures.


def test_llama_3_8b():
    bill = cost(PRESETS["llama3-8b"].options, 8192, batch=16, dtype="float16")
    assert bill.cache.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * KIB
    assert bill.cache.sequence_bytes == 1 * GIB
    assert bill.cache.total_bytes == 16 * GIB
    assert bill.cache.multi_head_bytes_per_token == 4 * 128 * KIB
    options = PRESETS["llama3-8b"].options
    many = dataclasses.replace(options, layers=(VARIANTS["causal"](num_kv_heads=32),))
    assert cost(many, 8192, 16, "float16").cache.total_bytes == 64 * GIB


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_parameters_of_published_models(preset, parameters):
    assert cost(PRESETS[preset].options, 1).parameters["total"] == parameters


def test_gpt2_but_for_biases_of_norms_and_mlp():
    # It has two norms a layer and one at the end, each with a bias of D, and biases in the MLP.
    biases = 25 * 768 + 12 * (3072 + 768)
    assert cost(PRESETS["gpt2"].options, 1024).parameters["total"] == 124_439_808 - biases


def test_deepseek_v2_keeps_576_numbers_where_multi_head_attention_keeps_32768():
    preset = PRESETS["deepseek-v2"].options
    cache = cost(preset, 4096, dtype="bfloat16").cache
    assert cache.bytes_per_token == 60 * 576 * 2
    assert cache.multi_head_bytes_per_token == 60 * 32_768 * 2
    assert cache.sequence_bytes == 4096 * cache.bytes_per_token
    # 21 of its 236 billion parameters are active for a token.
    assert round(cost(preset, 1).parameters["total"] / 1e9) == 21


def test_mistral_keeps_its_window():
    options = PRESETS["mistral-7b"].options
    short, long = (cost(options, n, dtype="float16").cache.sequence_bytes for n in (4096, 32_768))
    assert short == long == 4096 * 128 * KIB


def test_h_heads_cost_as_much_as_one_of_the_whole_width():
    bills = [
        cost(decoder("causal", options={"causal": {}}, num_heads=h, head_width=D // h), 50)
        for h in (1, 4, 8)
    ]
    for bill in bills:
        assert bill.parameters["attention"] == 4 * D**2
        assert bill.forward == bills[0].forward and bill.backward == bills[0].backward
        assert bill.cache == bills[0].cache and bill.decode == bills[0].decode


def test_sharing_keys_and_values_divides_the_cache():
    def per_token(kv_heads):
        options = {"causal": {"num_kv_heads": kv_heads}}
        return cost(decoder("causal", options=options, num_heads=8), 50).cache.bytes_per_token

    assert [per_token(k) / per_token(1) for k in (8, 2, 1)] == [8, 2, 1]
    assert per_token(2) == 2 * 2 * H * 4


def test_a_latent_costs_its_rank_and_the_rotary_width():
    bill = cost(decoder("mla"), 50)
    assert bill.cache.bytes_per_token == (48 + 32) * 4
    assert bill.cache.multi_head_bytes_per_token == 2 * N * H * 4


def pairs(bill) -> int:
    """Visible pairs of a one-layer model with full-width keys, from its FLOPs."""
    projections = 2 * bill.length * (D * H * (2 * N + 2 * K) + D * V)
    number, rest = divmod(bill.forward.visible - projections, 4 * N * H)
    assert rest == 0
    return number


def test_the_pairs_grow_with_the_square_of_the_length_and_with_a_window_linearly():
    for T in (100, 1000, 8000):
        assert pairs(cost(decoder("causal"), T)) == T * (T + 1) // 2
        assert pairs(cost(decoder("window"), T)) == T * 9 - 9 * 8 // 2
        assert cost(decoder("window"), T).cache.sequence_bytes == 9 * 2 * K * H * 4


def test_linear_attention_is_constant_per_token():
    short, long = (cost(decoder("linear"), T) for T in (64, 64 * 64))
    assert short.decode == long.decode
    assert short.cache.sequence_bytes == long.cache.sequence_bytes
    assert short.cache.bytes_per_token == 0
    for pass_ in ("forward", "backward"):
        for kind in ("visible", "computed"):
            a, b = (bill.per_token(getattr(getattr(bill, pass_), kind)) for bill in (short, long))
            assert a == b


def test_a_batch_and_a_pattern_add_up():
    one, many = cost(decoder("causal", "linear"), 33), cost(decoder("causal", "linear"), 33, 7)
    assert many.forward.visible == 7 * one.forward.visible
    assert many.per_token(many.backward.computed) == one.per_token(one.backward.computed)
    assert many.training.dense == 7 * one.training.dense
    # Layers beyond the pattern are its first ones again.
    L1, L2, L3, L5 = (
        cost(decoder("causal", "linear", num_layers=n), 33).forward.visible for n in (1, 2, 3, 5)
    )
    assert L3 - L2 != L2 - L1 and L5 - L3 == L3 - L1


def test_tiles_hold_no_scores():
    bills = [cost(decoder("causal"), T) for T in (1000, 2000)]
    assert bills[1].inference.tiled == 2 * bills[0].inference.tiled
    assert bills[1].training.tiled == 2 * bills[0].training.tiled
    assert bills[1].inference.dense > 3.8 * bills[0].inference.dense


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 4, "batch": -1}, "batch must be at least 1, got -1"),
        ({"length": 4, "dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
        ({"length": 4, "source_length": 3}, "source_length is 3, but the model has no encoder"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        cost(decoder("causal"), **arguments)


def test_more_tokens_than_learned_positions():
    options = decoder("causal", position="learned", max_length=16)
    assert cost(options, 16).parameters["positions"] == 16 * D
    with pytest.raises(ValueError, match="length must be at most the 16 learned positions"):
        cost(options, 17)


def test_a_variant_that_does_not_say_what_it_costs(monkeypatch):
    from attention.multi_head import MultiHeadAttention

    monkeypatch.delattr(MultiHeadAttention, "cost")
    with pytest.raises(NotImplementedError, match=r"MultiHeadAttention .* has no method cost"):
        cost(decoder("causal"), 4)


def test_describe_takes_length_and_batch_of_the_run():
    run = settings(tiny.config())
    T = run.task.length
    shown = {what: number for what, number, _ in describe(run)}
    assert shown[f"cache of a sequence of {T}"] == f"{2 * T * 4 * 4:,}"
    assert shown["cache of 4 sequences"] == f"{4 * 2 * T * 4 * 4:,}"
    shown = {what: number for what, number, _ in describe(run, length=20, batch=2)}
    assert shown["cache of 2 sequences"] == f"{2 * 2 * 20 * 4 * 4:,}"


@pytest.mark.parametrize(
    "path", sorted(Path(ROOT, "configs").glob("[!_]*.py")), ids=lambda p: p.stem
)
def test_every_config_has_a_cost(path):
    config = importlib.import_module(f"configs.{path.stem}").get_config().to_dict()
    assert describe(settings(resolve(config)))


def command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "analysis.cost", *flags], cwd=ROOT, text=True, timeout=300,
        capture_output=True,
    )  # fmt: skip


def test_the_command_prints_a_table():
    ended = command(
        "--config=configs/gqa.py", "--config.model.num_layers=3", "--length=8192",
        "--batch=16", "--dtype=float16",
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{2 * 3 * 2 * 16 * 2 * 8192 * 16:,}" in ended.stdout
    assert "16 × 8,192 tokens in float16" in ended.stdout


def test_the_command_knows_published_shapes():
    ended = command("--preset=llama3-8b", "--batch=16")
    assert (ended.returncode, ended.stderr) == (0, "")
    for figure in ("128 KiB", "512 KiB", "1 GiB", "16 GiB"):
        assert f" {figure} " in ended.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--config is needed"),
        (["--preset=gpt9"], "--preset must be one of gpt2, llama2-7b"),
        (["--preset=gpt2", "--length=0"], "gpt2: length must be at least 1, got 0"),
        *(
            pytest.param(*case, marks=pytest.mark.broad)
            for case in (
                (["--preset=gpt2", "--config=configs/gqa.py"], "exclude each other"),
                (["--config=configs/gqa.py", "--dtype=int8"], "dtype must be one of float32"),
                (["--config=configs/gqa.py", "--length=many"], "must be a whole number"),
                (["--config=configs/none.py"], "there is no such file"),
            )
        ),
    ],
)
def test_mistakes_of_the_command(flags, message):
    ended = command(*flags)
    assert ended.returncode == 2 and message in ended.stderr
    assert ended.stderr.count("\n") == 1 and not ended.stdout
