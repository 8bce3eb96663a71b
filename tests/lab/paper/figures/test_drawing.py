from dataclasses import replace

from paper.figures.made import RUN, seeds, training_rows

from dome_lab.paper.drawing import (
    add_note,
    canvas,
    extension_note,
    same_height,
    scale_note,
    statistics_note,
    subset_name,
)


def test_the_papers_own_settings_are_called_so():
    rows = seeds(RUN)
    assert scale_note(rows, RUN, num_seeds=3) == "Settings of the paper."


def test_every_departure_from_the_paper_is_named():
    small = replace(RUN, task="digits", num_train=2500, epochs=2, lr=0.5)
    note = scale_note(seeds(small), RUN)
    for part in (
        "digits (MNIST)",
        "training samples 2,500 (all)",
        "epochs 2 (6)",
        "learning rate 0.5 (0.1)",
        "seeds 3 (5)",
    ):
        assert part in note
    assert "test samples" not in note


def test_a_column_that_varies_is_left_out_or_given_as_a_range():
    rows = [row for b in (4, 16, 64) for row in seeds(replace(RUN, batch_size=b))]
    assert "B = 4 to 64 (128)" in scale_note(rows, RUN)
    assert "B =" not in scale_note(rows, RUN, varied=["batch_size"])


def test_an_arm_without_a_tracker_says_nothing_about_the_rank():
    rows = training_rows(RUN) + training_rows(replace(RUN, rank=None))
    assert scale_note(rows, RUN, num_seeds=1) == "Settings of the paper."
    alone = training_rows(replace(RUN, rank=None))
    assert scale_note(alone, RUN, num_seeds=1) == "Settings of the paper."


def test_the_interval_is_named_with_what_shows_it():
    expected = "Mean of 3 seeds, each a dot or thin line; shaded: 95% t interval."
    assert statistics_note(seeds(RUN)) == expected
    assert "; bars: 95%" in statistics_note(seeds(RUN), "bars")


def test_what_the_paper_has_no_experiment_on_is_not_held_against_it():
    run = replace(RUN, num_train=2500, epochs=2)
    note = extension_note(seeds(run), varied=["lr"])
    expected = "Beyond the paper: training samples 2,500, epochs 2, B = 128, k = 100."
    assert note == expected


def test_axes_that_are_compared_have_one_scale():
    _, ((first,), (second,)) = canvas(2, 1, 3, 3)
    first.set_ylim(0, 1)
    second.set_ylim(-1, 0.5)
    same_height([first, second])
    assert first.get_ylim() == second.get_ylim() == (-1, 1)


def test_a_subset_of_the_classes_is_part_of_the_name():
    assert subset_name("mnist", None) == "MNIST"
    assert subset_name("mnist", 5) == "MNIST, 5 classes"


def test_a_long_note_stays_on_the_figure():
    figure, _ = canvas(1, 1, 3.4, 2.5)
    add_note(figure, "training samples 2,500 (all), " * 12)
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= 3.4
