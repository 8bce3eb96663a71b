import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "models.md"
# Kinds, not names: an encoder with relative positions, windows, einsum, a table of
# positions; decoders; experts by groups and one by one; adapters that derive weights.
SOME = {
    "Transformers": [
        *("BERT", "DeBERTa", "Longformer", "XLNet", "XLM", "GPT-2", "Qwen3", "Mamba"),
        *("Mixtral", "Mixtral, eager experts", "Qwen2-MoE", "DeepSeek-V3", "CLIP"),
        *("LongT5", "Swin", "ResNet", "wav2vec 2.0", "RecurrentGemma", "ViLT"),
    ],
    "PEFT": ["LoRA", "DoRA", "BOFT", "LLaMA-Adapter", "prefix tuning"],
}


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # The page is of this generation: older ones lack models, or fail in float64.
    logging = pytest.importorskip("transformers", minversion="5.0").logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield __import__("model_zoo.__main__").__main__
    logging.set_verbosity(level)
    for name in [n for n in sys.modules if n.startswith("model_zoo")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")  # those of other people's models
@pytest.mark.parametrize(
    ("library", "name"), [(lib, name) for lib, names in SOME.items() for name in names]
)
def test_models_of_other_libraries_are_as_exact_as_the_page_says(zoo, library, name):
    verdict = zoo.judge(library, name, zoo.cases(library)[name])
    assert verdict.result in ("exact", "with `.eval()` on its batch norms")
    assert f"| {name} | {verdict.result} |" in PAGE.read_text()
    assert torch.get_default_dtype() == torch.float32


def test_the_page_has_sixty_models_and_none_that_is_wrong():
    rows = [r.split(" | ") for r in PAGE.read_text().splitlines() if r.startswith("| ")]
    results = [row[1] for row in rows if row[1] not in ("samples", "---")]
    assert len(results) >= 60
    assert "wrong" not in results
    assert results.count("exact") >= 60
