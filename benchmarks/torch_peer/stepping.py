"""Training steps of the decoder: eager, or through torch.compile."""

import numpy as np
import torch
from model import Decoder
from torch.nn import functional


def train_step(request):
    """Programs: ``step``. Says the losses of the first steps, from the parameters it was given.

    The request: ``file`` (npz of ``params/…`` and of ``tokens``, ``targets``, ``weights`` of some
    batches (N, B, T)), ``num_layers``, ``rope_base``, ``compile``, ``dtype``, ``check`` (steps
    whose losses are told), and AdamW's ``learning_rates`` (a step each, the last one for ever),
    ``betas``, ``weight_decay`` and ``clip_norm``.
    """
    with np.load(request["file"]) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    params = {n.removeprefix("params/"): a for n, a in arrays.items() if n.startswith("params/")}
    length = arrays["tokens"].shape[-1]
    model = Decoder(params, request["num_layers"], request["rope_base"], length)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": request["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=tuple(request["betas"]),
        eps=1e-8,
        fused=True,
    )
    dtype = getattr(torch, request["dtype"])
    parameters = matrices + vectors

    def loss_of(tokens, targets, weights):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(tokens)
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return (losses * weights.flatten()).sum() / weights.sum()

    loss_of = torch.compile(loss_of) if request["compile"] else loss_of
    rates, taken = request["learning_rates"], 0
    batches = [arrays[name] for name in ("tokens", "targets", "weights")]
    batches[1] = batches[1].long()

    def step():
        nonlocal taken
        for group in optimizer.param_groups:
            group["lr"] = rates[min(taken, len(rates) - 1)]
        loss = loss_of(*(array[taken % len(array)] for array in batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, request["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken += 1
        return loss.item()

    losses = [step() for _ in range(request["check"])]
    return {"step": step}, {"losses": losses}
