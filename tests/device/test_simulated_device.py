import copy

import pytest
import torch
from torch import nn

HERE = __file__


READS = {
    "float()": lambda x: float(x[0]),
    "bool()": lambda x: bool(x.any()),
    "item()": lambda x: x.sum().item(),
    "tolist()": lambda x: x.tolist(),
    "cpu()": lambda x: x.cpu(),
    "to(cpu)": lambda x: x.to("cpu"),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 0),
    "a mask as index": lambda x: x[x > 0],
    "a mask as place": lambda x: x.clone().__setitem__(x > 0, x[:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats given by a tensor": lambda x: x.repeat_interleave(x.long().abs()),
    "a copy to the host": lambda x: torch.empty(3).copy_(x),
    "a copy from the host": lambda x: x.copy_(torch.zeros(3)),
    "a list of copies": lambda x: torch._foreach_copy_([x], [torch.zeros(3)]),
    "a tensor from a list": lambda x: torch.tensor([1.0], device=x.device),
    "to the device": lambda x: torch.zeros(3).to(x.device),
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(3, device=x.device)),
    "eigh": lambda x: torch.linalg.eigh(torch.eye(3, device=x.device)),
    "inv": lambda x: torch.linalg.inv(torch.eye(3, device=x.device)),
}
STAYS = {
    "arithmetic": lambda x: (x * 2 + x.sum()).norm() / 3,
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "comparisons": lambda x: torch.where(x > 0, x, 0.0).clamp(min=1.0),
    "a number under a mask": lambda x: x.clone().__setitem__(x > 0, 1.0),
    "factories": lambda x: torch.arange(3, device=x.device) + torch.zeros_like(x),
    "indices": lambda x: x[torch.arange(2, device=x.device)],
    "views": lambda x: x[:2].view(2, 1).T.unsqueeze_(0),
    "products": lambda x: torch.outer(x, x) @ x,
    "a factorisation that is not checked": lambda x: torch.linalg.cholesky_ex(
        torch.eye(3, device=x.device)
    ),
    "qr": lambda x: torch.linalg.qr(torch.eye(3, device=x.device)),
    "shapes": lambda x: (x.shape, x.dtype, len(x), x.is_floating_point()),
    "a copy that need not arrive yet": lambda x: torch.zeros(3).to(
        x.device, non_blocking=True
    ),
    "copies on the device": lambda x: (x.clone().copy_(x), x.double()),
}


def made(device):
    return torch.arange(-1.0, 2.0, device=device.name)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_waits_and_is_listed_with_its_place(read, device):
    x = made(device)
    with device.counting() as waits:
        read(x)
    assert waits
    assert {wait.file for wait in waits} == {HERE}
    assert all(wait.line == read.__code__.co_firstlineno for wait in waits)


@pytest.mark.parametrize("stay", STAYS.values(), ids=STAYS.keys())
def test_what_stays_on_the_device_does_not_wait(stay, device):
    x = made(device)
    with device.counting() as waits:
        stay(x)
    assert waits == []


def test_one_read_is_one_wait(device):
    x = made(device)
    with device.counting() as waits:
        float(x[0])
        x.tolist()
        x.cpu()
    assert [wait.operation for wait in waits] == [
        "aten._local_scalar_dense.default",
        "tolist",
        "aten._to_copy.default to the host",
    ]
    assert str(waits[0]).endswith("float(x[0])")


def test_nothing_is_counted_outside_of_the_block(device):
    x = made(device)
    float(x[0])
    with device.counting() as waits:
        pass
    float(x[0])
    assert waits == []
    assert len(device.waits) == 2


MIXES = {
    "addition": lambda x, y: x + y,
    "a product": lambda x, y: torch.outer(x, x) @ y,
    "in place": lambda x, y: y.add_(x),
    "joined numbers": lambda x, y: torch.stack([x[0], y[0]]),
    "an index": lambda x, y: x[y.long()],
    "a layer": lambda x, y: nn.functional.linear(x, y[None]),
    "a random choice": lambda x, y: x.normal_(generator=torch.Generator()),
    "random numbers": lambda x, y: torch.randn(
        3, generator=torch.Generator("cpu"), device=x.device
    ),
    "a random choice elsewhere": lambda x, y: y.normal_(
        generator=torch.Generator(x.device)
    ),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_mix_of_devices_is_an_error(mix, device):
    with pytest.raises(RuntimeError, match=r"mixes sim and cpu|got a generator on"):
        mix(made(device), torch.zeros(3))


def test_numpy_is_an_error_as_on_any_other_device(device):
    with pytest.raises(TypeError, match=r"use \.cpu\(\)"):
        made(device).numpy()


def test_numbers_are_those_of_the_cpu(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten())
    x = torch.randn(2, 3, 5, 5)
    there = copy.deepcopy(model).to(device.name)
    with device.counting() as waits:
        y = there(x.to(device.name, non_blocking=True)).square().sum()
        y.backward()
    assert waits == []
    model(x).square().sum().backward()
    for p, q in zip(model.parameters(), there.parameters(), strict=True):
        assert q.device.type == "sim"
        assert isinstance(q, nn.Parameter)
        assert torch.equal(q.grad.cpu(), p.grad)


def test_a_generator_lives_on_the_device_and_draws_the_numbers_of_the_cpu(device):
    ours, cpu = device.generator(3), torch.Generator().manual_seed(3)
    assert ours.device == torch.device(device.name)
    drawn = torch.randn(4, generator=ours, device=device.name)
    assert torch.equal(drawn.cpu(), torch.randn(4, generator=cpu))
    again = torch.Generator(device.name)
    again.set_state(ours.get_state())
    assert torch.equal(
        torch.rand(3, generator=again, device=device.name).cpu(),
        torch.rand(3, generator=ours, device=device.name).cpu(),
    )
    assert isinstance(ours, torch.Generator)
    assert isinstance(cpu, torch.Generator)


def test_a_copied_parameter_is_a_parameter_on_the_device(device):
    p = nn.Parameter(made(device))
    q = copy.deepcopy(p)
    assert isinstance(q, nn.Parameter)
    assert q.requires_grad
    with torch.no_grad():
        q.zero_()
    assert p.detach().cpu().abs().sum() == 2


def test_torch_offers_no_accelerator_once_the_device_is_off(device):
    accelerator = pytest.importorskip("torch.accelerator")
    assert accelerator.is_available()


def test_views_share_their_numbers(device):
    x = made(device)
    x[1:].mul_(3)
    x.view(3, 1)[0] = 7.0
    assert x.tolist() == [7.0, 0.0, 3.0]
