"""Every claim of the two articles with its evidence, run again in a short form: docs/claims.md.

    python sweep.py --config=configs/sweeps/claims.py

Planned for 40 minutes on 2 cores. It needs what requirements-dev.txt installs, for the tests.
"""

from ml_collections import ConfigDict

from sweeps.claims.evidence import AtLeast, Bench, Pytest, StudyEvidence, Training
from sweeps.claims.rows import Claims, Row
from sweeps.claims.text import TextModel, WithLearnedSinks

_PLAIN = "--config.model.pattern=mha"

VARIANTS = StudyEvidence("variants", ("--seeds=1",), 8.5)
COPYING = StudyEvidence(
    "copying", ("--seeds=1", "--only=rope linear hybrid smeared smeared-none"), 5.5
)
HEADS = StudyEvidence("heads", (), 8.5)
EMERGENCE = StudyEvidence("emergence", ("--seeds=3",), 6.5)

ATTENTION = Bench("attention", "attention", ("--short", "--peers=dense"), 2.0)
# Where attention's own arithmetic outweighs what every call costs.
LONG = Bench(
    "attention-long", "attention",
    ("--variants=causal,linear", "--lengths=2048,4096,8192,16384", "--peers=dense",
     "--repeats=3"), 1.0,
)  # fmt: skip
DECODE = Bench("decode", "decode", ("--short",), 0.8)

MASKED = Training(
    "masked-tokens", "configs/full.py", ("--config.train.steps=1500",),
    (AtLeast("copy/accuracy", 0.9, "masked tokens of a copied string are found"),
     AtLeast("induction/accuracy", 0.9, "masked tokens of a repeated block are found")), 2.5,
)  # fmt: skip
CROSS = Training(
    "encoder-decoder", "configs/cross.py", ("--config.train.steps=1400",),
    (AtLeast("source_copy/accuracy", 0.9, "the decoder writes the encoder's sequence"),
     AtLeast("source_reverse/accuracy", 0.9, "and writes it backwards")), 2.0,
)  # fmt: skip
TEXT = TextModel("text", (_PLAIN,), 4.0)
SINKS = WithLearnedSinks(
    "text-learned-sinks", (_PLAIN, "--config.attention.mha.learned_sink=true"), 4.0
)


def _tests(row: int, *nodes: str, minutes: float = 0.2, reason: bool = False) -> Pytest:
    return Pytest(f"tests-{row}", tuple(f"tests/test_{node}" for node in nodes), minutes, reason)


def get_config():
    """Nothing: the page has no options of its own."""
    return ConfigDict()


def get_sweep():
    """Rows 1 to 30."""
    return Claims("The claims, one by one", _computation() + _masks() + _heads() + _cost(), "docs")


def _computation():
    return (
        Row(1, "Attention is a soft look-up: scores = QKᵀ/√d_k, row softmax, weighted sum of V",
            "weights .40 .20 .40 / .20 .40 .40 / .25 .25 .50; outputs [.6, .4], [.4, .6], [.5, .5]",
            (_tests(1, "attend.py::test_worked_example"),)),
        Row(2, "Only scores and softmax mix tokens; projections act on each token alone",
            "changing token j changes no projection of token i",
            (_tests(2, "decoder.py::test_only_attention_mixes_tokens",
                    "decoder.py::test_each_token_alone"),)),
        Row(3, "Separate Q, K, V: a relation may have a direction",
            "the score matrix is not symmetric for W_Q ≠ W_K",
            (_tests(3, "layers.py::test_relations_have_a_direction"),)),
        Row(4, "Dividing by √d_k keeps score variance at 1",
            "d_k = 64: deviation of q·k ≈ 7.99 over 100,000 pairs; softmax([1,2,3]) = .09 .24 .67, "
            "softmax([8,16,24]) = .00 .0003 .9997",
            (_tests(4, "attend.py::test_the_scale_keeps_the_variance_of_scores",
                    "attend.py::test_large_scores_saturate_the_softmax"),)),
        Row(5, "Without the scale a model hardly trains", "scale 1 against 1/√d_k, same seeds",
            (HEADS, EMERGENCE),
            "at d_k = 16 the scale is a factor of 4, and the model trains all the same, only "
            "later. At d_k = 64, the article's own example, it does not, as is confirmed above."),
        Row(6, "Additive (Bahdanau) attention came first; dot products beat it in speed and memory",
            "score = vᵀ tanh(W q + U k)",
            (_tests(6, "additive.py::test_scores_by_hand", "additive.py::test_equals_float64"),
             ATTENTION, VARIANTS)),
    )  # fmt: skip


def _masks():
    return (
        Row(7, "Bidirectional (BERT): every token sees every token", "–",
            (_tests(7, "layers.py::test_every_token_sees_every_token"), MASKED)),
        Row(8, "Causal (GPT): token i sees j ≤ i, so one forward pass trains n predictions",
            "logits up to t do not move when later tokens change",
            (_tests(8, "attend.py::test_later_tokens_move_nothing",
                    "decoder.py::test_only_attention_mixes_tokens"),)),
        Row(9, "Cross-attention: Q from one sequence, K and V from another",
            "encoder-decoder on a sequence-to-sequence task",
            (_tests(9, "attend_hidden.py::test_cross_attention",
                    "encoder_decoder.py::test_the_decoder_looks_back_and_the_encoder_both_ways",
                    minutes=0.4),
             CROSS)),
        Row(10, "Padding mask: a padded key's weight is exactly 0", "0, not 1e-9",
            (_tests(10, "attend_hidden.py::test_the_weight_of_a_padded_key_is_exactly_zero"),)),
        Row(11, "Without positions attention is permutation-equivariant",
            "shuffling tokens shuffles rows, no more",
            (_tests(11, "attend.py::test_permutation_equivariance",
                    "layers.py::test_shuffling_tokens_shuffles_rows"),)),
        Row(12, "RoPE: the score depends on m − n only; no parameters; V untouched", "–",
            (_tests(12, "rope.py::test_scores_depend_on_the_distance_alone",
                    "layers.py::test_rotation"),)),
    )  # fmt: skip


def _heads():
    return (
        Row(13, "h heads of width d/h cost as much, and have as many parameters, as one of width d",
            "4d² parameters either way",
            (_tests(13, "layers.py::test_heads_cost_no_parameters",
                    "cost.py::test_h_heads_cost_as_much_as_one_of_the_whole_width"),
             ATTENTION, HEADS)),
        Row(14, "Several softmaxes can look at several places at once",
            "1 head against 4 at equal d",
            (HEADS, EMERGENCE,
             _tests(14, "attend.py::test_several_softmaxes_look_at_several_places_at_once",
                    reason=True)),
            "these tasks ask for one place at a time. One wide head finds it sooner than four "
            "narrow ones; at the end of a longer training, that of emergence, they are equal. "
            "Asked for two places at once, two softmaxes give both and one gives half of each."),
        Row(15, "Heads specialise: previous-token heads, induction heads, delimiter heads",
            "head scores", (EMERGENCE, TEXT)),
        Row(16, "Induction circuit: a previous-token head in an earlier layer, an induction head in"
            " a later one; it completes … A B … A → B", "two layers do it, one layer does not",
            (EMERGENCE,)),
        Row(17, "Induction heads appear at one moment of training, and in-context learning jumps at"
            " that moment", "the emergence curve", (EMERGENCE,),
            "the induction heads need some of so few other heads to know where to look. Leaving "
            "out those with half the previous-token score of the best does not suffice, for weaker "
            "ones carry part of it; preserving all patterns does."),
        Row(18, "Attention sink: idle heads put their weight on the first token",
            "mass on position 0 per head", (TEXT, SINKS),
            "no head of this model, small and trained on 2 million tokens, is idle. Were one, it "
            "would give its weight to a learned sink, a logit that carries no value."),
        Row(19, "Keeping a few first tokens in a sliding window keeps streaming stable far past the"
            " training length", "StreamingLLM: window alone 5158, with 4 first tokens 5.40",
            (TEXT, SINKS),
            "a window alone is nearly as stable, for there are no sinks to be lost (row 18)."),
        Row(20, "Many heads are redundant: pruning a good share at test time costs almost nothing",
            "accuracy against share of heads removed, in order of importance", (EMERGENCE,),
            "in so small a model the heads share the work, and few of them are idle: more than a "
            "third of 2 × 8 are induction heads, a quarter of 2 × 4. Of 8 heads one is .125, so "
            "few seeds leave the share uncertain: docs/emergence.md has five."),
    )  # fmt: skip


def _cost():
    return (
        Row(21, "Time grows with n²: doubling n quadruples attention", "exponent 2", (LONG,)),
        Row(22, "A plain implementation stores n × n scores",
            "n = 32K: about 10⁹ elements per head and layer", (ATTENTION,)),
        Row(23, "KV cache per token = 2 × layers × kv heads × head dim × bytes per number",
            "Llama 3 8B in fp16: 128 KiB per token, 1 GiB at 8K, 16 GiB for 16 requests; with 32 "
            "kv heads 4 × as much",
            (_tests(23, "cache.py::test_llama_3_8b", "cost.py::test_llama_3_8b"),)),
        Row(24, "MQA shares one K, V among all heads (cache ÷ h, some quality lost); GQA per group "
            "(near MHA quality, near MQA speed)", "8 query heads: 8 / 2 / 1 kv heads",
            (_tests(24, "cache.py::test_shared_heads_shrink_the_cache"), DECODE, VARIANTS, HEADS),
            "these tasks ask a key to tell 60 symbols apart, and one shared key of 16 numbers can. "
            "With 4 numbers it cannot, and sharing costs accuracy."),
        Row(25, "MLA caches a low-dimensional latent and restores K, V from it", "bytes per token",
            (_tests(25, "latent.py::test_both_forms_equal_float64",
                    "latent.py::test_the_cache_of_deepseek_v2", minutes=0.5), DECODE, VARIANTS)),
        Row(26, "FlashAttention: tiles and online softmax; the same result; memory linear in n; "
            "several times faster; n² arithmetic stays",
            "equal to the dense result; peak bytes; speed-up",
            (_tests(26, "tiled.py::test_any_tile",
                    "tiled.py::test_twice_the_length_takes_twice_the_memory", minutes=0.5), LONG)),
        Row(27, "Sliding window costs n · w; Longformer adds a few global tokens; models alternate "
            "window and global layers",
            "fitted exponents; accuracy of window-only against window + global layers",
            (ATTENTION, DECODE, VARIANTS)),
        Row(28, "Linear attention: φ(q)φ(k), reordered, costs n; causally it is an RNN with a "
            "fixed-size state",
            "parallel = chunked = recurrent; constant bytes and time per generated token",
            (_tests(28, "linear_ops.py::test_output_and_state_equal_brute_force",
                    "linear_ops.py::test_state_bytes_do_not_depend_on_the_length", minutes=0.5),
             LONG, DECODE)),
        Row(29, "A fixed-size state cannot hold exact history: copying gets clearly worse; hybrids "
            "with a few softmax layers win it back",
            "copy accuracy against length, for softmax / linear / hybrid", (COPYING, VARIANTS)),
        Row(30, "The improvements that lasted keep “every position can look up every position "
            "exactly”", "the table of all variants, below", (VARIANTS,)),
    )  # fmt: skip
