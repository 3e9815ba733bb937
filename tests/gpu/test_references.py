"""References in pinned host memory, and what they leave of the live weights."""

import pytest
import torch
from torch import nn

from sage_ray.references import ReferenceBank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@torch.no_grad()
def test_a_bank_on_the_host_is_the_bank_on_the_device() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(512, 512, device="cuda") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    banks = [ReferenceBank(model, torch.bfloat16, offload) for model, offload in zip(models, (False, True))]
    inputs, outputs = torch.randn(64, 512, device="cuda"), []
    for model, bank in zip(models, banks):
        bank.snapshot("anchor")
        model.weight.add_(0.1)
        bank.blend("anchor", 0.25)
        live = model.weight.clone()
        with bank.use("anchor"):
            outputs.append(model(inputs))
        assert torch.equal(model.weight, live)
        outputs.append(model(inputs))
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    on_device, on_host = (bank.tensors() for bank in banks)
    assert len(on_device) == 4 and on_host == []
