import sys
sys.path.insert(0, "/work/main")
import pytest
from attention.latent import Latent
from attention.additive import Additive
from attention.multi_head import MultiHead
from tests import contract
from tests.contract import Variant
VARIANTS = [
    Variant("mla", Latent(latent_rank=5)),
    Variant("mla_query_latent", Latent(latent_rank=7, query_rank=3, rope_width=4)),
    Variant("mla_smeared", Latent(latent_rank=5, smeared_keys=True), constant_bytes=8),
    Variant("mla_unrotated", Latent(latent_rank=5, smeared_keys=True), model={"position": "none"}),
    Variant("additive", Additive(), model={"position": "none"}),
    Variant("additive_window", Additive(mask_expression="Causal() & (Window(4) | First(1))", num_kv_heads=2, smeared_keys=True), model={"position": "learned", "max_length": 200}, slots=lambda n: min(n, 5), constant_bytes=48),
]
@pytest.mark.parametrize(("check", "variant"), contract.cases(VARIANTS))
def test_contract(check, variant):
    check(variant)
