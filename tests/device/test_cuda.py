import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from device.agreement import assert_agree
from device.nccl import nccl_worker
from device.training import attached, flat, outcome, seeded_batches, train
from torch import nn
from torch.nn.functional import cross_entropy

import dome

# What CUDA's products need to give the same bits again.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

KIND = PLACE = "cuda"  # test_dry_run.py puts the simulated device here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@contextlib.contextmanager
def waiting_is_an_error():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_forward_and_backward_do_not_wait():
    model, optimizer, _ = attached(PLACE)
    train(model, optimizer, seeded_batches(2))
    ((x, y),) = seeded_batches(1)
    x, y = x.to(PLACE), y.to(PLACE)
    optimizer.zero_grad()
    with waiting_is_an_error():
        cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    "options", [{}, {"layout": "layerwise"}], ids=["one", "layers"]
)
def test_a_step_waits_as_often_as_on_the_simulated_device(options):
    model, optimizer, _ = attached(PLACE, **options)
    train(model, optimizer, seeded_batches(2))
    ((x, y),) = seeded_batches(1)
    optimizer.zero_grad()
    cross_entropy(model(x.to(PLACE)), y.to(PLACE)).backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) <= (3 if options else 2), "\n".join(str(w.message) for w in waits)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(PLACE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_what_the_plan_says(dtype):
    x, y = torch.randn(32, 512).to(PLACE), torch.randint(10, (32,)).to(PLACE)

    def peak(filtered):
        model = wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if filtered:
            dome.attach(model, optimizer, 32, basis_dtype=dtype)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        return torch.cuda.max_memory_allocated()

    extra = peak(True) - peak(False)
    predicted = next(
        choice.memory
        for choice in dome.plan(wide(), 32, 32).choices
        if choice.layout == "global" and choice.basis_dtype == dtype
    )
    # The caching allocator rounds; one large product may take a copy of the samples.
    assert 0.75 * predicted < extra < 1.5 * predicted


@pytest.mark.parametrize("options", [{}, {"layout": "layerwise"}, {"tracker": "svd"}])
def test_a_run_resumes_bit_for_bit(options, tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        data = seeded_batches(6)
        model, optimizer, grad_filter = attached(PLACE, **options)
        train(model, optimizer, data[:3])
        torch.save(
            [model.state_dict(), optimizer.state_dict(), grad_filter.state_dict()],
            tmp_path / "run.pt",
        )
        train(model, optimizer, data[3:])
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
        again, again_optimizer, again_filter = attached(PLACE, **options)
        for part, state in zip(
            (again, again_optimizer, again_filter), saved, strict=True
        ):
            part.load_state_dict(state)
        train(again, again_optimizer, data[3:])
        assert torch.equal(flat(again), flat(model))
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_with_a_scaler_trains_as_without():
    found = []
    for factor in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler(KIND, init_scale=factor, growth_interval=1000)
        model, optimizer, grad_filter = attached(PLACE, scaler=scaler)
        for x, y in seeded_batches(4):
            optimizer.zero_grad()
            with torch.autocast(KIND, dtype=torch.float16):
                loss = cross_entropy(model(x.to(PLACE)), y.to(PLACE))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append(outcome(model, grad_filter))
    # float16 activations round the two runs apart.
    torch.testing.assert_close(
        found[0]["parameters"], found[1]["parameters"], rtol=2e-2, atol=2e-3
    )


def test_a_step_that_the_scaler_skips_leaves_the_basis_alone():
    scaler = torch.amp.GradScaler(KIND, init_scale=2.0**12)
    model, optimizer, grad_filter = attached(PLACE, scaler=scaler)
    ((x, y),) = seeded_batches(1)
    x[0, 0] = float("inf")
    before = flat(model)
    scaler.scale(cross_entropy(model(x.to(PLACE)), y.to(PLACE))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(flat(model), before)
    assert grad_filter.stats.step == 0


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def test_two_workers_over_nccl_train_as_one_process_with_the_whole_batch():
    if torch.cuda.device_count() < 2 and not os.environ.get("DOME_NCCL_ONE_GPU"):
        pytest.skip("nccl wants a device a worker; DOME_NCCL_ONE_GPU=1 tries with one")
    two_workers_train_as_one("nccl")


def two_workers_train_as_one(backend):
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        workers = [
            context.Process(target=nccl_worker, args=(worker, port, folder, backend))
            for worker in range(2)
        ]
        for process in workers:
            process.start()
        for process in workers:
            process.join(timeout=300)
        assert all(process.exitcode == 0 for process in workers)
        paths = [folder / f"{worker}.pt" for worker in range(2)]
        found = [torch.load(path, weights_only=True) for path in paths]
    model, optimizer, _ = attached("cpu", torch.float64, tracker="svd")
    train(model, optimizer, seeded_batches(3, torch.float64))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], flat(model), rtol=1e-9, atol=1e-9)


def test_a_gpu_says_what_the_processor_says():
    found = []
    for place in (PLACE, "cpu"):
        model, optimizer, grad_filter = attached(place, torch.float64)
        train(model, optimizer, seeded_batches(6, torch.float64))
        found.append(outcome(model, grad_filter))
    assert_agree(*found, torch.float64)
