import subprocess
import sys

import pytest

from dome_lab.paper import figures
from dome_lab.paper.figures import caption, figure_names, load_figure

NUM_FIGURES = 10


def test_every_figure_of_the_paper_is_there_and_extensions_come_last():
    names = figure_names()
    numbers = [int(name[3:5]) for name in names if name.startswith("fig")]
    assert numbers == list(range(1, NUM_FIGURES + 1))
    tables = [n for n in names if n.startswith("tab")]
    assert names[NUM_FIGURES:] == tables + [n for n in names if n.startswith("ext")]


def test_files_named_after_a_table_or_an_extension_are_found(tmp_path, monkeypatch):
    for name in ("tab03_times", "ext07_more", "fig99_last", "figure", "_panels"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(figures, "__path__", [str(tmp_path)])
    assert figure_names() == ["fig99_last", "tab03_times", "ext07_more"]


def test_a_figure_is_loaded_by_its_number_or_its_name():
    assert load_figure("fig03") is load_figure("fig03_mnist_compression")
    assert load_figure("ext00") is load_figure("ext00_choices")


def test_a_wrong_name_is_refused_with_the_nearest_right_one():
    with pytest.raises(ValueError, match="no figure 'fig3': did you mean 'fig03'"):
        load_figure("fig3")
    with pytest.raises(ValueError, match="did you mean 'fig05_cifar10_spectrum'"):
        load_figure("cifar10_spectrum")


@pytest.mark.parametrize("name", figure_names())
def test_the_caption_is_the_first_line_of_the_docstring(name):
    assert caption(name) == load_figure(name).__doc__.splitlines()[0]
    assert caption(name).endswith(".")


def test_listing_figures_imports_nothing_heavy():
    code = (
        "import sys; from dome_lab.paper.figures import caption, figure_names; "
        "print([caption(n) for n in figure_names()]); "
        "print({'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.endswith("set()\n")


@pytest.mark.parametrize("name", figure_names())
def test_three_scales_and_at_least_three_seeds_on_real_data(name):
    figure = load_figure(name)
    assert set(figure.SCALES) - {"full"} == {"smoke", "cpu", "paper"}
    assert num_judged_seeds(figure, "paper") == 5
    assert num_judged_seeds(figure, "cpu") >= 3


def num_judged_seeds(figure, scale):
    config = figure.SCALES[scale]
    if hasattr(figure, "later_runs"):  # its first runs are not judged
        return config.num_seeds
    return len({run.seed for run in figure.runs(config)})


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_figures_share_their_runs(scale):
    def runs(name):
        figure = load_figure(name)
        return set(figure.runs(figure.SCALES[scale]))

    assert runs("fig03") < runs("fig07")
    assert runs("fig10") <= runs("fig09")
    # The paper's averaging momentum is fig01's own.
    by_sgd = {run for run in runs("fig01") if run.optimizer == "sgd"}
    assert by_sgd
    assert by_sgd <= runs("fig09")
    harsh = {run for run in runs("fig03") if run.rate in (100, 1000)}
    if scale != "cpu":  # where these have smaller ones
        assert harsh < runs("ext00")
    if scale != "smoke":
        assert {run for run in harsh if run.rate == 1000} < runs("fig04")


def test_rows_of_different_kinds_come_from_modules_of_different_names():
    # Rows are found again by their run and by the name of the module that made them.
    made = {}
    for name in figure_names():
        compute = load_figure(name).compute_run
        made.setdefault(compute.__module__.rpartition(".")[2], set()).add(compute)
    assert {kind: len(functions) for kind, functions in made.items()} == dict.fromkeys(
        made, 1
    )
