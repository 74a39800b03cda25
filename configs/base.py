"""Every option once, with its unit and its reason. The other configs are diffs from this one.

Any option can be set from the command line, ``--config.optimizer.learning_rate=1e-3``. An option
shown as a placeholder is unset, and says what stands in for it.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def multi_head(**changes) -> ConfigDict:
    """Options of softmax attention with several heads; see ``attention.multi_head``."""
    group = ConfigDict(
        {
            "variant": "causal",  # a name in attention.VARIANTS
            "num_kv_heads": placeholder(int),  # unset: as many as query heads
            "rope_width": placeholder(int),  # channels rotated; unset: the whole head
            "scale": placeholder(float),  # factor of the scores; unset: 1/sqrt(head width)
            "qk_norm": False,  # RMS-normalise queries and keys per head
            "bias": False,  # biases of the four projections
            "dropout": 0.0,  # share of attention weights dropped in training
            "smeared_keys": False,  # mix every key with its predecessor's
            "learned_sink": False,  # a trained logit per head that takes weight, gives no value
        }
    )
    group.update(changes)
    return group


def linear(**changes) -> ConfigDict:
    """Options of linear attention; see ``attention.linear``."""
    group = ConfigDict(
        {
            "variant": "linear",
            "num_kv_heads": placeholder(int),
            "rope_width": placeholder(int),
            "feature_map": "elu",  # or "relu", "softmax", "taylor"
            "smeared_keys": False,
        }
    )
    group.update(changes)
    return group


def latent(**changes) -> ConfigDict:
    """Options of multi-head latent attention; see ``attention.latent``."""
    group = ConfigDict(
        {
            "variant": "mla",
            "latent_rank": 24,  # numbers of the latent that restores keys and values
            "rope_width": placeholder(int),  # of the shared rotary key; unset: half a head
            "query_rank": placeholder(int),  # unset: queries are projected directly
            "scale": placeholder(float),  # unset: 1/sqrt(head width + rotary width)
            "dropout": 0.0,
            "smeared_keys": False,
        }
    )
    group.update(changes)
    return group


def additive(**changes) -> ConfigDict:
    """Options of additive attention; see ``attention.additive``."""
    group = ConfigDict(
        {
            "variant": "additive",
            "num_kv_heads": placeholder(int),
            "mask_expression": "Causal()",  # any mask that the layer's use allows
            "dropout": 0.0,
            "smeared_keys": False,
        }
    )
    group.update(changes)
    return group


def get_config() -> ConfigDict:
    """The defaults: two layers that learn copying and induction in about a minute on 2 cores."""
    config = ConfigDict()
    config.seed = 0  # of everything that has no seed of its own

    config.model = model = ConfigDict()
    model.num_layers = 2  # one layer alone cannot do induction
    model.d_model = 64  # channels of the residual stream
    model.num_heads = 4  # query heads
    model.head_width = placeholder(int)  # channels of a head; unset: d_model / num_heads
    model.pattern = ("mha",)  # attention groups, cycled over the depth
    model.encoder_num_layers = placeholder(int)  # of encoder-decoders; unset: num_layers
    model.encoder_pattern = placeholder(tuple)  # likewise; unset: ("full",)
    model.mlp = "gelu"  # or "swiglu", or "none" for attention-only models
    model.d_ff = placeholder(int)  # hidden channels of the MLP; unset: 4 x d_model
    model.tied_head = False  # whether the output head is the embedding transposed
    model.position = "rope"  # or "learned", or "none"
    model.max_length = placeholder(int)  # learned positions; unset: task.length
    model.rope_base = 10_000.0  # wavelength base of the rotation, as in the paper
    model.rope_layout = "half_split"  # or "interleaved": which channels form a pair
    model.dtype = "float32"  # of activations, or "bfloat16"; parameters stay float32
    model.implementation = "auto"  # of softmax attention; a name insists on one
    model.init_seed = placeholder(int)  # of the parameters; unset: seed

    config.attention = attention = ConfigDict()
    attention.mha = multi_head()
    attention.gqa = multi_head(num_kv_heads=2)
    attention.mqa = multi_head(num_kv_heads=1)
    attention.causal = multi_head()
    attention.smeared = multi_head(smeared_keys=True)
    attention.full = multi_head(variant="full")
    attention.prefix = multi_head(variant="prefix", prefix=8)  # positions that see each other
    attention.window = multi_head(variant="window", window=16)  # positions, its own included
    attention.streaming = multi_head(variant="streaming", window=16, first=2)
    attention.longformer = multi_head(
        variant="longformer", window=16, num_global=2, global_projections=False
    )
    attention.longformer_encoder = multi_head(
        variant="longformer_encoder", window=16, num_global=2, global_projections=False
    )
    attention.masked = multi_head(
        variant="masked", mask_expression="Causal() & (Window(16) | First(1))"
    )
    attention.cross = multi_head(variant="cross")  # of every decoder layer in encoder-decoders
    attention.linear = linear()
    attention.mla = latent()
    attention.additive = additive()

    config.task = task = ConfigDict()
    task.vocab_size = 64  # ids, the four special ones included
    task.length = 64  # tokens in a sequence
    task.copy = ConfigDict()
    task.copy.share = 0.5  # of the rows of a batch, relative to the other tasks' shares
    task.copy.min_length = 1  # symbols in the string
    task.copy.max_length = placeholder(int)  # unset: what fits, (length - 1) / 2
    task.induction = ConfigDict()
    task.induction.share = 0.5
    task.induction.min_period = placeholder(int)  # symbols in the block; unset: length / 4
    task.induction.max_period = placeholder(int)  # unset: length / 2
    task.source_copy = ConfigDict()  # sequence to sequence: write what the encoder reads
    task.source_copy.share = 0.0
    task.source_copy.min_length = 1
    task.source_copy.max_length = placeholder(int)  # unset: length
    task.source_reverse = ConfigDict()  # the same, backwards
    task.source_reverse.share = 0.0
    task.source_reverse.min_length = 1
    task.source_reverse.max_length = placeholder(int)
    task.recall = ConfigDict()  # key-value pairs, then queries (Zoology's MQAR)
    task.recall.share = 0.0
    task.recall.num_pairs = 4
    task.recall.gap_power = 0.01  # smaller: queries come sooner after the pairs
    task.markov = ConfigDict()  # Markov chains to be learned in context
    task.markov.share = 0.0
    task.text = ConfigDict()  # crops of files
    task.text.share = 0.0
    task.text.files = placeholder(str)  # pattern; unset: Python's standard library
    task.text.tokenizer = "bpe"  # learned from the files, of task.vocab_size ids; or "bytes"

    config.train = train = ConfigDict()
    train.steps = 1000  # optimizer steps
    train.batch_size = 64  # sequences
    train.objective = "next_token"  # or "masked_token", or "sequence_to_sequence"
    train.mask_rate = placeholder(float)  # share of tokens hidden; with "masked_token" only
    train.loss_on = "answers"  # or "all": every position but padding
    train.log_every = 50  # steps between two lines of metrics.jsonl
    train.eval_every = 100  # steps between two evaluations
    train.data_seed = placeholder(int)  # of batches and dropout; unset: seed

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 3e-3  # the highest, after the warm-up
    optimizer.schedule = "cosine"  # down to a tenth, or "constant"
    optimizer.warmup_steps = 50
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95  # shorter memory than .999: the loss drops abruptly in these tasks
    optimizer.weight_decay = 0.1  # of matrices, times the learning rate
    optimizer.clip_norm = 1.0  # global norm of the gradient

    config.eval = evaluation = ConfigDict()
    evaluation.batches = 8
    evaluation.batch_size = 64  # sequences
    evaluation.seed = 1000  # fixed: runs of different seeds are evaluated on the same sequences

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 250  # steps; a killed run loses at most these
    checkpoint.keep = 2  # newest ones kept, beside the best

    config.analysis = analysis = ConfigDict()
    analysis.every = 0  # steps between two looks at heads and loss by position; 0: none
    analysis.sequences = 32  # of the held-out tasks, for loss by position
    analysis.around = 0  # positions averaged on either side of those of the in-context score
    analysis.bos = True  # whether the sequences that heads are scored on begin with BOS
    return config
