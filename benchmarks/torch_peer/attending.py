"""Attention alone: SDPA, and FlexAttention through torch.compile."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

MASKS = {
    "causal": lambda case: lambda b, h, q, k: q >= k,
    "window": lambda case: lambda b, h, q, k: (q >= k) & (q - k < case["window"]),
    "longformer": lambda case: (
        lambda b, h, q, k: (q >= k) & ((q - k < case["window"]) | (k < case["num_global"]))
    ),
}


def sdpa(case):
    """Skips the upper half where the mask is causal; any other mask is a T × T array.

    The array is what is added to the scores: one of True and False would be made into it by every
    call.
    """
    options = {"enable_gqa": case["N"] != case["K"]}
    if case["mask"] == "causal":
        options["is_causal"] = True
    else:
        index = torch.arange(case["T"])
        allowed = MASKS[case["mask"]](case)(0, 0, index[:, None], index[None])
        zeros = torch.zeros(allowed.shape, dtype=getattr(torch, case["dtype"]))
        options["attn_mask"] = zeros.masked_fill_(~allowed, -torch.inf)
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def flex(case):
    """Visits the blocks that the mask leaves."""
    T = case["T"]
    blocks = create_block_mask(MASKS[case["mask"]](case), None, None, T, T, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"block_mask": blocks, "enable_gqa": case["N"] != case["K"]}
    return lambda q, k, v: compiled(q, k, v, **options)


PEERS = {"SDPA": sdpa, "FlexAttention": flex}


def attention(request):
    """Programs: ``forward``, and ``both``, forward with all gradients.

    The request: ``peer``, ``mask`` with its options, ``B``, ``T``, ``N``, ``K``, ``H``, ``dtype``,
    and ``programs``, the names of those wanted.
    """
    attend = PEERS[request["peer"]](request)
    B, T, H = (request[letter] for letter in "BTH")
    dtype = getattr(torch, request["dtype"])

    def array(heads):
        return torch.randn(B, heads, T, H, dtype=dtype)

    q, k, v = (array(request[letter]) for letter in "NKK")
    do = torch.randn_like(q)
    with_gradient = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward():
        with torch.no_grad():
            return attend(q, k, v)

    def both():
        return torch.autograd.grad(attend(*with_gradient), with_gradient, do)

    programs = {"forward": forward, "both": both}
    programs = {name: programs[name] for name in request["programs"]}
    for program in programs.values():
        program()  # compiles, and says now what it cannot do
    return programs, {}
