import io

import pytest
import torch
from compressors import COMPRESSORS
from safetensors.torch import load, save
from torch import nn

import dome
from dome.compression import Message, sum_messages

EVERY = pytest.mark.parametrize("name", COMPRESSORS)


def vector(dim, rng, dtype=torch.float32):
    return torch.randn(dim, generator=rng, dtype=dtype)


@EVERY
def test_a_message_is_bytes_of_the_stated_size_and_comes_back(name, rng):
    for dim, dtype in ((1, torch.float64), (7, torch.float32), (1000, torch.float64)):
        compressor = COMPRESSORS[name](dim)
        first = compressor.encode(vector(dim, rng, dtype))
        second = compressor.encode(1e-3 * vector(dim, rng, dtype))
        assert first.payload.dtype == torch.uint8
        assert first.payload.shape == second.payload.shape
        assert first.num_bits == 8 * len(first.payload) == compressor.num_bits(dim)
        recovered = compressor.decode(first)
        assert recovered.shape == (dim,)
        assert recovered.dtype == dtype
        assert recovered.isfinite().all()


@EVERY
def test_calling_is_the_round_trip(name, rng):
    for dtype in (torch.float32, torch.float64):
        one, other = COMPRESSORS[name](100), COMPRESSORS[name](100)
        for _ in range(3):
            g = vector(100, rng, dtype)
            called = one(g)
            assert called.dtype == dtype
            if "gaussian" not in name:  # simulated when called, in distribution
                assert torch.equal(called, other.decode(other.encode(g)))


@EVERY
def test_what_arrives_points_where_the_vector_does(name, rng):
    g = vector(100, rng, torch.float64)
    compressor = COMPRESSORS[name](100)
    assert compressor(g).dot(g) > 0
    assert compressor.decode(compressor.encode(-g)).dot(g) < 0


@EVERY
def test_decoding_depends_on_the_message_alone_wherever_it_lies(name, rng):
    compressor, fresh = COMPRESSORS[name](77), COMPRESSORS[name](77)
    messages = [compressor.encode(vector(77, rng)) for _ in range(3)]
    expected = [compressor.decode(m) for m in messages]
    before = {k: v.clone() for k, v in compressor.state_dict().items()}
    for message, vec in reversed(list(zip(messages, expected, strict=True))):
        length = len(message.payload)
        gathered = torch.zeros(3 * length + 1, dtype=torch.uint8)[1:].view(3, length)
        gathered[1] = message.payload
        assert torch.equal(fresh.decode(Message(gathered[1])), vec)
        assert torch.equal(compressor.decode(message), vec)
    after = compressor.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in after)


@EVERY
def test_the_vector_is_left_as_it_is_and_may_be_a_stride_or_need_gradients(name, rng):
    wide = vector(200, rng).requires_grad_()
    g = wide[::2]
    before = g.detach().clone()
    message = COMPRESSORS[name](100).encode(g)
    called = COMPRESSORS[name](100)(g)
    assert not called.requires_grad
    called.zero_()
    assert torch.equal(g, before)
    assert torch.equal(COMPRESSORS[name](100).encode(before).payload, message.payload)


@EVERY
def test_a_state_goes_on_bit_for_bit_through_torch_and_safetensors(name, rng):
    g = [vector(100, rng) for _ in range(4)]
    compressor = COMPRESSORS[name](100)
    for x in g[:2]:
        compressor(x)
        compressor.encode(x)
    state = compressor.state_dict()
    expected = [compressor(g[2]), compressor.encode(g[3]).payload]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), load(save(state))):
        resumed = COMPRESSORS[name](100)
        resumed.load_state_dict(loaded)
        again = [resumed(g[2]), resumed.encode(g[3]).payload]
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@EVERY
def test_a_state_from_before_any_use_starts_again(name, rng):
    g = vector(100, rng)
    compressor = COMPRESSORS[name](100)
    start = compressor.state_dict()
    first = [compressor(g), compressor.encode(g).payload]
    compressor.load_state_dict(start)
    assert torch.equal(compressor(g), first[0])
    assert torch.equal(compressor.encode(g).payload, first[1])


@EVERY
def test_the_global_generator_is_neither_read_nor_advanced(name):
    state = torch.random.get_rng_state()
    g = torch.arange(100.0) - 40
    first = COMPRESSORS[name](100)(g)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(COMPRESSORS[name](100)(g), first)


# A kind each: noise by step, a generator's state, memory and a factor.
@pytest.mark.parametrize("name", ["randomk", "gaussian", "powersgd, error feedback"])
def test_it_stands_after_the_filter_and_resumes_with_it(name, rng):
    data = [
        (torch.randn(8, 6, generator=rng), torch.randint(3, (8,), generator=rng))
        for _ in range(6)
    ]

    def start():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        after = COMPRESSORS[name](93)
        return model, optimizer, dome.attach(model, optimizer, rank=4, after=after)

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model, optimizer, grad_filter = start()
    train(model, optimizer, data[:3])
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = load(save(grad_filter.state_dict()))
    train(model, optimizer, data[3:])

    resumed, optimizer, grad_filter = start()
    resumed.load_state_dict(weights)
    grad_filter.load_state_dict(saved)
    train(resumed, optimizer, data[3:])
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@EVERY
def test_messages_are_summed_if_the_compressor_is_linear_and_refused_if_not(name, rng):
    g = [vector(100, rng, torch.float64) for _ in range(3)]
    workers = [COMPRESSORS[name](100) for _ in range(4)]
    messages = [w.encode(x) for w, x in zip(workers, g, strict=False)]
    if not workers[0].is_linear:
        with pytest.raises(ValueError, match="not linear cannot be added"):
            sum_messages(messages)
        return
    total = sum_messages(messages)
    assert total.num_bits == messages[0].num_bits
    recovered = workers[0].decode(total)
    expected = sum(workers[0].decode(m) for m in messages)
    whole = workers[3].decode(workers[3].encode(sum(g)))
    # Numbers travel as float32.
    torch.testing.assert_close(recovered, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recovered, whole, rtol=1e-5, atol=1e-5)


@EVERY
def test_messages_of_other_steps_or_lengths_are_not_summed(name, rng):
    compressor = COMPRESSORS[name](100)
    if not compressor.is_linear:
        return  # refused above
    first, second = (compressor.encode(vector(100, rng)) for _ in range(2))
    with pytest.raises(ValueError, match=r"messages of steps 0 and 1 cannot be added"):
        sum_messages([first, second])
    shorter = COMPRESSORS[name](96).encode(vector(96, rng))
    with pytest.raises(ValueError, match="different compressors, settings or dim"):
        sum_messages([first, shorter])
