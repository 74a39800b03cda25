"""Decoding token by token through a static cache: eager, or through torch.compile."""

import numpy as np
import torch
from model import Decoder


def decode(request):
    """Programs: ``tokens``, one call for ``num_tokens`` tokens after a cache filled to ``length``.

    The request: ``file`` (npz of ``params/…``), ``num_layers``, ``rope_base``, ``compile``,
    ``batch``, ``length``, ``num_tokens``. Says the ids of the tokens that follow id 1 after a
    cache of zeros.
    """
    with np.load(request["file"]) as file:
        params = {n.removeprefix("params/"): torch.from_numpy(file[n]) for n in file.files}
    batch, length, num_tokens = (request[name] for name in ("batch", "length", "num_tokens"))
    shape = request["num_layers"], request["rope_base"], length + num_tokens
    model = Decoder(params, *shape).requires_grad_(False)
    caches = []
    for block in model.blocks:
        heads = block.attention
        shape = batch, heads.kv_heads, length + num_tokens, heads.width
        caches.append((torch.zeros(shape), torch.zeros(shape)))

    def step(token_B1, position):
        return model.decode(token_B1, position, caches)[:, -1].argmax(-1, keepdim=True)

    # Every length is compiled for itself: sizes that are not known cost speed.
    step = torch.compile(step, dynamic=False) if request["compile"] else step

    def tokens():
        token_B1, ids = torch.ones(batch, 1, dtype=torch.int64), []
        with torch.inference_mode():
            for i in range(num_tokens):
                token_B1 = step(token_B1, torch.tensor([length + i]))
                ids.append(token_B1)
        return torch.cat(ids, 1)

    return {"tokens": tokens}, {"tokens": tokens()[0].tolist()}
