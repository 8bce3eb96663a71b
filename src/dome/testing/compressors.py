"""The contract of a compressor: what the filter, error feedback and workers rely on.

``make`` is a function dim -> compressor; every call must make an equal one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dome.compression import Compressor, Message, sum_messages
from dome.filter import GradientFilter
from dome.testing.judge import must, must_equal, must_refuse, reloaded, run_all

Make = Callable[[int], Compressor]
DIM = 100


def a_message_is_bytes_of_the_stated_size_and_comes_back(make: Make) -> None:
    """Messages of one length have one size, and vectors keep shape and precision."""
    for dim, dtype in ((1, torch.float64), (7, torch.float32), (1000, torch.float64)):
        compressor, (g, h) = make(dim), _vectors(2, dim, dtype)
        first, second = compressor.encode(g), compressor.encode(1e-3 * h)
        must(first.payload.dtype == torch.uint8, f"payload: {first.payload.dtype}")
        sizes = {first.num_bits, second.num_bits, 8 * len(first.payload)}
        stated = compressor.num_bits(dim)
        must(sizes == {stated}, f"{sizes} bits, and num_bits({dim}) is {stated}")
        out = compressor.decode(first)
        must(out.shape == (dim,) and out.dtype == dtype, f"it decodes to {out}")
        must(bool(out.isfinite().all()), f"it decodes to {out}")


def calling_is_the_round_trip(make: Make) -> None:
    """``compressor(g)`` is ``decode(encode(g))``."""
    for dtype in (torch.float32, torch.float64):
        one, other = make(DIM), make(DIM)
        for g in _vectors(3, dtype=dtype):
            must_equal(one(g), other.decode(other.encode(g)), "the two differ")


def what_arrives_points_where_the_vector_does(make: Make) -> None:
    """A step along it is downhill."""
    (g,), compressor = _vectors(1, dtype=torch.float64), make(DIM)
    must(bool(compressor(g).dot(g) > 0), "called, it turns a vector round")
    back = compressor.decode(compressor.encode(-g))
    must(bool(back.dot(g) < 0), "decoded, a vector is turned round")


def decoding_depends_on_the_message_alone(make: Make) -> None:
    """In any order, by any equal compressor, wherever the bytes lie."""
    compressor, fresh = make(DIM), make(DIM)
    messages = [compressor.encode(g) for g in _vectors(3)]
    expected = [compressor.decode(m) for m in messages]
    before = {k: v.clone() for k, v in compressor.state_dict().items()}
    for message, vector in reversed(list(zip(messages, expected, strict=True))):
        length = len(message.payload)
        gathered = torch.zeros(3 * length + 1, dtype=torch.uint8)[1:].view(3, length)
        gathered[1] = message.payload
        must_equal(fresh.decode(Message(gathered[1])), vector, "another one differs")
        must_equal(compressor.decode(message), vector, "in another order it differs")
    must_equal(dict(compressor.state_dict()), before, "decoding changes the state")


def the_vector_is_left_as_it_is(make: Make) -> None:
    """It may be a stride or need gradients, and what comes back is no view of it."""
    wide = torch.cat(_vectors(2)).requires_grad_()
    g = wide[::2]
    before = g.detach().clone()
    message, called = make(DIM).encode(g), make(DIM)(g)
    must(not called.requires_grad, "what comes back has a graph")
    called.zero_()
    must_equal(g.detach(), before, "the vector was changed")
    same = make(DIM).encode(before)
    must_equal(same.payload, message.payload, "a copy has another message")


def a_state_resumes_bit_for_bit(make: Make) -> None:
    """``state_dict`` is all that counts, and survives being saved."""
    g, compressor = _vectors(4), make(DIM)
    for x in g[:2]:
        compressor(x)
        compressor.encode(x)
    saved = reloaded(compressor.state_dict())
    expected = compressor(g[2]), compressor.encode(g[3]).payload
    resumed = make(DIM)
    resumed.load_state_dict(saved)
    must_equal((resumed(g[2]), resumed.encode(g[3]).payload), expected, "it differs")


def a_state_from_before_any_use_starts_again(make: Make) -> None:
    """A state of a new compressor takes back what was done since."""
    (g,), compressor = _vectors(1), make(DIM)
    start = reloaded(compressor.state_dict())
    first = compressor(g), compressor.encode(g).payload
    compressor.load_state_dict(start)
    must_equal((compressor(g), compressor.encode(g).payload), first, "it differs")


def the_global_generator_is_left_alone(make: Make) -> None:
    """It is neither read nor advanced: the training loop's numbers stay the same."""
    state = torch.random.get_rng_state()
    (g,) = _vectors(1)
    first = make(DIM)(g)
    must_equal(torch.random.get_rng_state(), state, "torch's generator moved on")
    must_equal(make(DIM)(g), first, "two equal compressors differ")


def it_stands_after_the_filter_and_resumes_with_it(make: Make) -> None:
    """As ``after=``: a saved run continues bit for bit."""
    model, grad_filter = _filtered(make)
    _step(model, grad_filter, 0)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = reloaded(grad_filter.state_dict())
    straight = _step(model, grad_filter, 1)
    model, grad_filter = _filtered(make)
    model.load_state_dict(weights)
    grad_filter.load_state_dict(saved)
    must_equal(_step(model, grad_filter, 1), straight, "a resumed run differs")


def messages_are_summed_if_it_is_linear_and_refused_if_not(make: Make) -> None:
    """The decoded sum is the sum of the decoded, and the decoded of the sum."""
    g = _vectors(3, dtype=torch.float64)
    workers = [make(DIM) for _ in range(4)]
    messages = [w.encode(x) for w, x in zip(workers, g, strict=False)]
    if not workers[0].is_linear:
        must_refuse(lambda: sum_messages(messages), "not linear cannot be added")
        return
    total = sum_messages(messages)
    must(total.num_bits == messages[0].num_bits, "a sum has another size")
    recovered = workers[0].decode(total)
    whole = workers[3].decode(workers[3].encode(torch.stack(g).sum(0)))
    apart = torch.stack([workers[0].decode(m) for m in messages]).sum(0)
    # Numbers travel as float32.
    torch.testing.assert_close(recovered, apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recovered, whole, rtol=1e-5, atol=1e-5)


def messages_of_other_steps_or_lengths_are_not_summed(make: Make) -> None:
    """They may be made with other random numbers, or of other entries."""
    compressor = make(DIM)
    if not compressor.is_linear:
        return  # refused above
    first, second = (compressor.encode(g) for g in _vectors(2))
    words = "messages of steps 0 and 1 cannot be added"
    must_refuse(lambda: sum_messages([first, second]), words)
    shorter = make(DIM - 4).encode(_vectors(1, DIM - 4)[0])
    words = "different compressors, settings or dim"
    must_refuse(lambda: sum_messages([first, shorter]), words)


COMPRESSOR_CHECKS = (
    a_message_is_bytes_of_the_stated_size_and_comes_back,
    calling_is_the_round_trip,
    what_arrives_points_where_the_vector_does,
    decoding_depends_on_the_message_alone,
    the_vector_is_left_as_it_is,
    a_state_resumes_bit_for_bit,
    a_state_from_before_any_use_starts_again,
    the_global_generator_is_left_alone,
    it_stands_after_the_filter_and_resumes_with_it,
    messages_are_summed_if_it_is_linear_and_refused_if_not,
    messages_of_other_steps_or_lengths_are_not_summed,
)


def check_compressor(make: Make) -> None:
    """Raise ``AssertionError`` unless filter and workers can rely on a compressor.

    Args:
        make: A function dim -> compressor; every call makes an equal one.
    """
    run_all(COMPRESSOR_CHECKS, make)


def _vectors(
    count: int, dim: int = DIM, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(dim, generator=rng, dtype=dtype) for _ in range(count)]


def _filtered(make: Make) -> tuple[nn.Module, GradientFilter]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    dim = sum(p.numel() for p in model.parameters())
    return model, GradientFilter(model, rank=4, after=make(dim))


def _step(model: nn.Module, grad_filter: GradientFilter, seed: int) -> list[Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(x).square().sum(dim=1).mean().backward()
    grad_filter.step()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)
    return [p.detach().clone() for p in model.parameters()]
