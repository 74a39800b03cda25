"""Every attention variant through the contract."""
import pytest
from attention.multi_head import MultiHead
from tests import contract
from tests.contract import Variant
VARIANTS = [Variant("mha", MultiHead()), Variant("gqa", MultiHead(num_kv_heads=2)), Variant("mqa", MultiHead(num_kv_heads=1, smeared_keys=True), constant_bytes=24)]

@pytest.mark.parametrize(("check", "variant"), contract.cases(VARIANTS))
def test_contract(check, variant):
    check(variant)
