import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Kinds, not names. Of causal models: attention, experts, a state space, linear
# attention, bytes joined to patches, two streams; dropout, masks, layers and noise that
# are drawn; images that are put into sentences; adapters that derive weights.
SOME = {
    "causal language models": [
        "Llama",
        "Mixtral",
        "Mamba",
        "Qwen3Next",
        "Blt",
        "XLNet",
    ],
    "vision-language models": [
        *("Llava, one image", "SmolVLM, two images", "Qwen2VL, two images"),
        "Gemma3, two images",  # whose images are zeros to its sentences at the start
    ],
    "other Transformers": [
        *("DeBERTa", "Longformer", "LongT5", "Swin", "ResNet", "wav2vec 2.0"),
        *("Switch Transformers", "ViLT"),
    ],
    "PEFT": ["DoRA", "BOFT", "prefix tuning"],
}
RESULTS = {
    *("exact", "exact with `.eval()` on its batch norms", "exact with `samples_in`"),
    *("refused", "not tried"),
}


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # The rows are of this generation: older ones lack models, or fail in float64.
    logging = pytest.importorskip("transformers", minversion="5.0").logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield importlib.import_module("model_zoo.__main__")
    logging.set_verbosity(level)
    forget()


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("model_zoo.table")
    forget()


def forget():
    for name in [n for n in sys.modules if n.startswith("model_zoo")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")  # those of other people's models
@pytest.mark.parametrize(
    ("library", "name"), [(lib, name) for lib, names in SOME.items() for name in names]
)
def test_models_of_other_libraries_do_what_the_page_says(zoo, library, name):
    verdict = zoo.judge(library, name, zoo.cases(library)[name])
    rows = [r for r in zoo.table.read() if (r["library"], r["name"]) == (library, name)]
    said = [(row["forward"], row["result"]) for row in rows]
    assert said == [(verdict.forward, verdict.result)], verdict
    assert torch.get_default_dtype() == torch.float32


def test_the_page_is_made_of_the_rows(table):
    assert table.page(table.PAGE.read_text(), table.read()) == table.PAGE.read_text()


def test_no_model_is_changed_by_a_filter_and_none_has_wrong_rows(table):
    rows = table.read()
    assert {row["result"] for row in rows} <= RESULTS
    assert {row["forward"] for row in rows} <= {"identical", ""}
    for row in rows:
        compared = row["result"].startswith("exact")
        assert (row["error"] is not None) == compared, row
        assert compared <= bool(row["forward"]), row


def test_what_is_refused_is_named(table):
    for row in table.read():
        if row["result"] == "refused" or " with " in row["result"]:
            assert re.search(r"(parameter|layer|input) '[\w.]+'", row["reason"]), row


def test_every_causal_model_of_the_auto_class_has_a_row(zoo):
    rows = [r for r in zoo.table.read() if r["library"] == "causal language models"]
    made_with = f"transformers {version('transformers')}, "
    if not rows[0]["made_with"].startswith(made_with):
        pytest.skip(f"the rows are of {rows[0]['made_with']}")
    causal = importlib.import_module("model_zoo.causal_models")
    assert {row["name"] for row in rows} == {*causal.CAUSAL, *causal.NOT_BUILT}
    assert len(rows) >= 170
