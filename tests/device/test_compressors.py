import pytest
import torch
from compressors import COMPRESSORS
from device.agreement import assert_agree

from dome.compression import GaussianSketch, Message, sum_messages

DIM = 100
EVERY = pytest.mark.parametrize("name", COMPRESSORS)
LINEAR = [name for name, make in COMPRESSORS.items() if make(DIM).is_linear]
# The noise of these is drawn on the vector's device.
DRAWING = ("gaussian", "qsgd", "terngrad")


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_and_what_comes_of_them_are_those_of_the_cpu(
    name, dtype, simulated, rng
):
    found = []
    vectors = [torch.randn(DIM, generator=rng, dtype=dtype) for _ in range(3)]
    for place in (simulated.name, "cpu"):
        compressor = COMPRESSORS[name](DIM)
        messages = [compressor.encode(v.to(place)) for v in vectors]
        decoded = [compressor.decode(m) for m in messages]
        called = [compressor(v.to(place)) for v in vectors]
        assert all(t.device.type == place.partition(":")[0] for t in called + decoded)
        # A message names the kind of device that drew a Gaussian sketch.
        payloads = [] if "gaussian" in name else [m.payload for m in messages]
        found.append([payloads, decoded, called])
    assert_agree(*found, dtype)


@EVERY
def test_a_compressor_keeps_its_device_and_its_promise(name, device, rng):
    compressor = COMPRESSORS[name](DIM)
    g = torch.randn(DIM, generator=rng, dtype=torch.float64)
    message = compressor.encode(g.to(device.name))
    assert message.num_bits == compressor.num_bits(DIM)
    decoded = COMPRESSORS[name](DIM).decode(message)
    assert decoded.device.type == device.name.partition(":")[0]
    if not name.startswith(DRAWING):
        here = COMPRESSORS[name](DIM)
        # Numbers travel as float32.
        assert_agree(decoded, here.decode(here.encode(g)), torch.float32)


@EVERY
def test_a_message_may_be_read_on_the_cpu(name, device, rng):
    if "gaussian" in name:
        pytest.skip("its sketch is drawn on the device; the message says which")
    g = torch.randn(DIM, generator=rng).to(device.name)
    compressor = COMPRESSORS[name](DIM)
    message = compressor.encode(g)
    there = compressor.decode(message)
    here = COMPRESSORS[name](DIM).decode(Message(message.payload.cpu()))
    assert_agree(there, here, torch.float32)


def test_a_gaussian_message_of_another_kind_of_device_is_refused(device, rng):
    g = torch.randn(DIM, generator=rng)
    message = GaussianSketch(4.0).encode(g.to(device.name))
    with pytest.raises(ValueError, match="the message was"):
        GaussianSketch(4.0).decode(Message(message.payload.cpu()))


@pytest.mark.parametrize("name", LINEAR)
def test_messages_are_summed_on_the_device(name, device, rng):
    vectors = [torch.randn(DIM, generator=rng).to(device.name) for _ in range(3)]
    workers = [COMPRESSORS[name](DIM) for _ in vectors]
    total = sum_messages([w.encode(v) for w, v in zip(workers, vectors, strict=True)])
    assert total.payload.device.type == device.name.partition(":")[0]
    whole = COMPRESSORS[name](DIM)
    expected = whole.decode(whole.encode(sum(vectors)))
    # Each is rounded to float32 before they are added.
    torch.testing.assert_close(
        whole.decode(total).cpu(), expected.cpu(), rtol=1e-5, atol=1e-5
    )


@EVERY
def test_a_state_goes_on_on_the_device(name, device, rng):
    vectors = [torch.randn(DIM, generator=rng).to(device.name) for _ in range(4)]
    compressor, resumed = COMPRESSORS[name](DIM), COMPRESSORS[name](DIM)
    for v in vectors[:2]:
        compressor(v)
        compressor.encode(v)
    resumed.load_state_dict({k: v.cpu() for k, v in compressor.state_dict().items()})
    for v in vectors[2:]:
        assert torch.equal(resumed(v).cpu(), compressor(v).cpu())
        payloads = [c.encode(v).payload.cpu() for c in (resumed, compressor)]
        assert torch.equal(*payloads)


@EVERY
def test_a_value_that_is_not_finite_is_named_on_the_device(name, device, rng):
    g = torch.randn(DIM, generator=rng)
    g[17] = float("nan")
    with pytest.raises(ValueError, match="entry 17 of the gradient is nan"):
        COMPRESSORS[name](DIM).encode(g.to(device.name))


@EVERY
def test_a_call_waits_for_the_device_once(name, simulated, rng):
    compressor = COMPRESSORS[name](DIM)
    g = torch.randn(DIM, generator=rng).to(simulated.name)
    compressor(g)
    with simulated.counting() as waits:
        compressor(g)
    # Whether it is finite; a called GaussianSketch does not ask.
    assert len(waits) == (0 if name == "gaussian" else 1), "\n".join(map(str, waits))


@EVERY
def test_encoding_waits_once_and_decoding_twice(name, simulated, rng):
    if "error feedback" in name:
        pytest.skip("encodes and decodes the compressor's own messages")
    compressor = COMPRESSORS[name](DIM)
    g = torch.randn(DIM, generator=rng).to(simulated.name)
    with simulated.counting() as encoding:
        message = compressor.encode(g)
    with simulated.counting() as decoding:
        compressor.decode(message)
    assert len(encoding) == 1, "\n".join(map(str, encoding))
    # The header with all check sums, and whether what comes of it is finite.
    assert len(decoding) == 2, "\n".join(map(str, decoding))
