"""What benchmarks/gpu.sh times, and how fast ours must be beside whom."""

from __future__ import annotations

import dataclasses

from attention.masks import Causal, Global, Mask, Window

OURS, CUDNN, SDPA, FLEX = "ours", "cuDNN", "SDPA", "FlexAttention"


@dataclasses.dataclass(frozen=True)
class Target:
    """Ours must be at least this many times as fast as the peer."""

    peer: str
    forward: float
    both: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A timed call, bfloat16; letters as in ``attention``."""

    name: str
    kind: str
    T: int
    target: Target
    window: int = 0
    num_global: int = 0
    B: int = 1
    N: int = 16
    K: int = 16
    H: int = 128
    calls: int = 10
    repeats: int = 7

    @property
    def mask(self) -> Mask:
        masks = {
            "causal": lambda: Causal(),
            "window": lambda: Window(self.window),
            "longformer": lambda: (
                Window(self.window, ahead=self.window - 1) | Global(self.num_global)
            ),
        }
        return masks[self.kind]()

    @property
    def for_torch(self) -> dict:
        fields = dataclasses.asdict(self)
        del fields["target"]
        return fields | {"global": self.num_global}

    def teraflops(self, seconds: float, products: int) -> float:
        """Of the pairs that the mask lets meet; forward is 2 products, the backward pass 5 more."""
        pairs = self.mask.count(self.T)
        return products * 2 * pairs * self.H * self.N * self.B / seconds / 1e12


SPARSE = Target(FLEX, 1.3, 1.3)
CASES = (
    Case("causal 8,192", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2),
    Case("causal 8,192, 16 to 2", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2, K=2),
    Case("causal 8,192, H = 64", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2, H=64),
    Case("window 1,024 in 32,768", "window", 32_768, SPARSE, window=1024),
    Case("longformer 256 + 4 in 32,768", "longformer", 32_768, SPARSE, window=256, num_global=4),
)
