import pytest
from torch import nn

from dome.parameters import Layout
from dome.samples import MicroBatch, PerSample, source_for


def test_sources_are_found_by_name():
    model = nn.Linear(3, 2)
    assert isinstance(source_for("microbatch", model, Layout(model)), MicroBatch)
    assert isinstance(source_for("per_sample", model, Layout(model)), PerSample)


def test_unknown_kind_of_samples_is_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="'single'"):
        source_for("single", model, Layout(model))
