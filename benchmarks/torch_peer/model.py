"""The decoder of the configs in PyTorch: the same parameters by the same names, the same formulas.

Parameters come as a dict of arrays whose names end in their shape, as the models of this project
have them: ``blocks/0/attention/heads/w_q_DNH``.
"""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, gain_D):
        super().__init__()
        self.gain_D = nn.Parameter(gain_D)

    def forward(self, x):
        return functional.rms_norm(x, self.gain_D.shape, self.gain_D, eps=1e-6)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, half-split."""

    def __init__(self, params):
        super().__init__()
        q_DNH, k_DKH, v_DKH = (params[f"heads/w_{x}"] for x in ("q_DNH", "k_DKH", "v_DKH"))
        self.heads, self.kv_heads, self.width = q_DNH.shape[1], k_DKH.shape[1], q_DNH.shape[2]
        self.w_qkv = nn.Parameter(
            torch.cat([w.flatten(1) for w in (q_DNH, k_DKH, v_DKH)], 1).T.contiguous()
        )
        self.w_o = nn.Parameter(params["w_o_NHD"].flatten(0, 1).T.contiguous())

    def heads_of(self, x_BTD, cos, sin):
        """Rotated queries and keys, and values, (B, heads, T, H)."""
        B, T, _ = x_BTD.shape
        N, K = self.heads, self.kv_heads
        qkv = functional.linear(x_BTD, self.w_qkv).view(B, T, N + 2 * K, self.width)
        qkv = qkv.transpose(1, 2)
        a, b = qkv[:, : N + K].chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return rotated[:, :N], rotated[:, N:], qkv[:, N + K :]

    def forward(self, x_BTD, cos, sin):
        q, k, v = self.heads_of(x_BTD, cos, sin)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return functional.linear(out.transpose(1, 2).flatten(2), self.w_o)

    def decode(self, x_B1D, cos, sin, position, mask_1S, keys, values):
        """One token against a static cache (B, K, S, H), which it enters at its position."""
        q, k, v = self.heads_of(x_B1D, cos, sin)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask_1S, enable_gqa=self.heads != self.kv_heads
        )
        return functional.linear(out.transpose(1, 2).flatten(2), self.w_o)


class Block(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.attention_norm = RMSNorm(params["attention_norm/gain_D"])
        self.attention = Attention(under(params, "attention"))
        self.mlp_norm = RMSNorm(params["mlp_norm/gain_D"])
        self.w_in = nn.Parameter(params["mlp/w_in_DF"].T.contiguous())
        self.w_out = nn.Parameter(params["mlp/w_out_FD"].T.contiguous())

    def feed_forward(self, x):
        hidden = functional.linear(self.mlp_norm(x), self.w_in)
        return x + functional.linear(functional.gelu(hidden, approximate="tanh"), self.w_out)

    def forward(self, x, cos, sin):
        return self.feed_forward(x + self.attention(self.attention_norm(x), cos, sin))

    def decode(self, x, *where):
        return self.feed_forward(x + self.attention.decode(self.attention_norm(x), *where))


class Decoder(nn.Module):
    """logits = norm(blocks(embedding[tokens])) W_head, for sequences of up to ``length`` tokens."""

    def __init__(self, params, num_layers, rope_base, length):
        super().__init__()
        self.embedding = nn.Parameter(params["w_embed_VD"])
        self.blocks = nn.ModuleList(Block(under(params, f"blocks/{i}")) for i in range(num_layers))
        self.norm = RMSNorm(params["norm/gain_D"])
        self.w_head = nn.Parameter(params["w_head_DV"].T.contiguous())
        width = self.blocks[0].attention.width
        frequency = rope_base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = torch.arange(length)[:, None].float() * frequency
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens_BT):
        x = functional.embedding(tokens_BT, self.embedding)
        T = tokens_BT.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return functional.linear(self.norm(x), self.w_head)

    def decode(self, tokens_B1, position, caches):
        """Logits of one more token at ``position``, an int64 tensor of one number."""
        x = functional.embedding(tokens_B1, self.embedding)
        cos, sin = self.cos[position], self.sin[position]
        # Once a step, and as the sum that attention would make of True and False in every layer.
        later_S = torch.arange(caches[0][0].shape[2]) > position
        mask_1S = torch.zeros_like(later_S, dtype=x.dtype).masked_fill(later_S, -torch.inf)[None]
        for block, (keys, values) in zip(self.blocks, caches, strict=True):
            x = block.decode(x, cos, sin, position, mask_1S, keys, values)
        return functional.linear(self.norm(x), self.w_head)


def under(params, prefix):
    """The parameters below a path, by the rest of their names."""
    start = prefix + "/"
    return {name[len(start) :]: value for name, value in params.items() if name.startswith(start)}
