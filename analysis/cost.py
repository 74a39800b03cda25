"""What a model costs, from its options alone: ``python -m analysis.cost --config=configs/gqa.py``.

Nothing is allocated and nothing runs. Letters as in ``attention``. With n the FLOPs of a layer's
products with parameters and m those of its pairs (``layer.cost``), a forward pass over T tokens is

    Σ_layers (n + m) + 2 · T · (mlp matrices + D · V),

and the backward pass is twice that, and what it computes again. A pair is a query and a key that
the mask lets it see; "as computed" has all T · S of them, which is what the reference multiplies.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from analysis.cost_terms import Activations, Cache, Flops, Terms
from models.decoder import DecoderOptions
from models.encoder_decoder import EncoderDecoderOptions

# float16 has the size of bfloat16, the only 16-bit type that models are built in.
DTYPES = {"float32": ("float32", 4), "bfloat16": ("bfloat16", 2), "float16": ("bfloat16", 2)}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The bill of a model for a batch of sequences of T tokens.

    Attributes:
      length, batch, dtype, source_length: what it is for; the source is an encoder's, else None.
      parameters: numbers by part, and "total".
      parameter_bytes: of all of them in ``dtype``.
      forward, backward: of a training step.
      decode: FLOPs of one more token of one sequence whose cache then holds T; None without cache.
      cache: None where a mask lets queries see later keys, so that nothing can be decoded.
      inference, training: peak bytes of activations in a forward pass, and with its gradient.
    """

    length: int
    batch: int
    dtype: str
    source_length: int | None
    parameters: dict[str, int]
    parameter_bytes: int
    forward: Flops
    backward: Flops
    decode: int | None
    cache: Cache | None
    inference: Activations
    training: Activations

    def per_token(self, flops: int) -> Fraction:
        """FLOPs divided by the B · T tokens of the batch; those of a source are not counted."""
        return Fraction(flops, self.batch * self.length)


def cost(
    options: DecoderOptions,
    length: int,
    batch: int = 1,
    dtype: str | None = None,
    source_length: int | None = None,
) -> Cost:
    """The bill of a model.

    Args:
      options: of a decoder or an encoder-decoder.
      length: T.
      batch: B.
      dtype: of activations and cache, "float32", "bfloat16" or "float16"; default the model's.
      source_length: S, tokens that an encoder reads; default T.

    Raises:
      ValueError: a length or batch below 1, more tokens than learned positions, another dtype, or
        a source for a model without an encoder.
      NotImplementedError: a variant or MLP that does not say what it costs.
    """
    dtype = options.dtype if dtype is None else dtype
    _check(options, length, batch, dtype, source_length)
    if isinstance(options, EncoderDecoderOptions) and source_length is None:
        source_length = length
    built_as, itemsize = DTYPES[dtype]
    terms = Terms(dataclasses.replace(options, dtype=built_as), length, source_length)
    parameters = terms.parameters()
    forward, backward = terms.flops(batch)
    inference, training = terms.activations(batch, itemsize)
    return Cost(
        length=length,
        batch=batch,
        dtype=dtype,
        source_length=source_length,
        parameters=parameters,
        parameter_bytes=parameters["total"] * itemsize,
        forward=forward,
        backward=backward,
        decode=terms.decode_flops(),
        cache=terms.cache(batch, itemsize),
        inference=inference,
        training=training,
    )


def describe(settings, length: int | None = None, batch: int | None = None) -> list[tuple]:
    """Rows (what, number, in round figures) on the cost of a run, for ``training.progress.table``.

    Args:
      settings: ``training.settings.Settings`` of the run.
      length: T; default that of its task.
      batch: B; default that of its training.
    """
    length = settings.task.length if length is None else length
    batch = settings.train.batch_size if batch is None else batch
    return rows(cost(settings.model, length, batch))


def rows(bill: Cost) -> list[tuple[str, str, str]]:
    """The bill as rows (what, number, in round figures)."""
    B, T = bill.batch, bill.length
    table = [_count(f"parameters: {part}", n) for part, n in bill.parameters.items()]
    table.append(_size(f"parameters in {bill.dtype}", bill.parameter_bytes))
    for name, flops in (("forward", bill.forward), ("backward", bill.backward)):
        table += [
            _count(f"{name} FLOPs per token, visible pairs", bill.per_token(flops.visible)),
            _count(f"{name} FLOPs per token, as computed", bill.per_token(flops.computed)),
        ]
    if bill.cache is None:
        table.append(("cache", "none", "later keys are seen"))
    else:
        cache = bill.cache
        table += [
            _count(f"FLOPs of token {T:,} by the cache", bill.decode),
            _size("cache per token", cache.bytes_per_token),
            _size("cache per token, as multi-head attention", cache.multi_head_bytes_per_token),
            _size(f"cache of a sequence of {T:,}", cache.sequence_bytes),
            _size(f"cache of {B:,} sequences", cache.total_bytes),
        ]
    for name, activations in (("inference", bill.inference), ("training", bill.training)):
        table += [
            _size(f"{name} activations, reference (about)", activations.dense),
            _size(f"{name} activations, tiled (about)", activations.tiled),
        ]
    return table


def _check(options, length, batch, dtype, source_length) -> None:
    sizes = {"length": length, "batch": batch}
    if source_length is not None:
        sizes["source_length"] = source_length
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if options.position == "learned" and name != "batch" and value > options.max_length:
            raise ValueError(
                f"{name} must be at most the {options.max_length} learned positions of "
                f"model.max_length, got {value}"
            )
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if source_length is not None and not isinstance(options, EncoderDecoderOptions):
        raise ValueError(f"source_length is {source_length}, but the model has no encoder")


def _count(what: str, number: int | Fraction) -> tuple[str, str, str]:
    exact = f"{int(number):,}" if number.denominator == 1 else f"{float(number):,.1f}"
    return what, exact, _rounded(float(number), 1000, ("", " k", " M", " G", " T", " P"))


def _size(what: str, size: int) -> tuple[str, str, str]:
    units = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")
    return what, f"{size:,}", _rounded(size, 1024, units)


def _rounded(number: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:.4g}{unit}"
        number /= step
    return f"{number:.4g}{units[-1]}"


if __name__ == "__main__":
    from analysis.cost_command import main

    main()
