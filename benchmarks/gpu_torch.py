"""PyTorch's attention on the same card; runs in an interpreter that has torch and nothing of ours.

Reads a JSON list of cases from standard input and prints one JSON object a line, {"torch": version}
and then {"case": name, "peer": "SDPA" or "FlexAttention", "forward": seconds, "both": seconds}, or
"error" instead of the times.
"""

import json
import statistics
import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

MASKS = {
    "causal": lambda case: lambda b, h, q, k: q >= k,
    "window": lambda case: lambda b, h, q, k: (q >= k) & (q - k < case["window"]),
    "longformer": lambda case: (
        lambda b, h, q, k: (
            ((q - k < case["window"]) & (k - q < case["window"]))
            | (q < case["global"])
            | (k < case["global"])
        )
    ),
}


def seconds(function, calls: int, repeats: int) -> float:
    """Median over repeats of the time of one call."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / calls)
    return statistics.median(times)


def sdpa(case):
    if case["kind"] != "causal":
        raise NotImplementedError("SDPA skips no tile of this mask")
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=case["N"] != case["K"]
    )


def flex(case):
    block_mask = create_block_mask(
        MASKS[case["kind"]](case), None, None, case["T"], case["T"], device="cuda"
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(
        q, k, v, block_mask=block_mask, enable_gqa=case["N"] != case["K"]
    )


def measure(case, peer) -> dict:
    attention = peer(case)

    def array(heads):
        shape = case["B"], heads, case["T"], case["H"]
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = array(case["N"]), array(case["K"]), array(case["K"])
    do = torch.randn_like(q)

    def forward():
        with torch.no_grad():
            return attention(q, k, v)

    def both():
        return torch.autograd.grad(attention(q, k, v), (q, k, v), do)

    timing = case["calls"], case["repeats"]
    return {"forward": seconds(forward, *timing), "both": seconds(both, *timing)}


def main():
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for case in json.load(sys.stdin):
        for name, peer in (("SDPA", sdpa), ("FlexAttention", flex)):
            try:
                result = measure(case, peer)
            except Exception as error:  # reported in the table instead of a number
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps({"case": case["name"], "peer": name, **result}), flush=True)


if __name__ == "__main__":
    main()
