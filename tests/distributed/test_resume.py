import pytest
import torch
from checks import flat, rng, sgd, step
from launch import run_alone
from models import batches, small_classifier

import dome

pytestmark = pytest.mark.slow


def test_after_a_worker_is_killed_training_resumes_from_the_last_checkpoint(tmp_path):
    done = run_alone("killed.py", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes == ["started at 0", "killed at 7", "started at 6"]
    model = small_classifier()
    optimizer = sgd(model)
    dome.attach(model, optimizer, rank=6)
    for x, y in batches(rng(), 10):
        step(model, optimizer, x, y)
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    torch.testing.assert_close(end, flat(model), rtol=1e-9, atol=1e-9)
