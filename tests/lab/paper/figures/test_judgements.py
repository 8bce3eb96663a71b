from dataclasses import replace

import numpy as np
import pytest
from paper.figures.made import RUN, seeds, training_rows, two_arms

from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.figures import fig09_batch_size_accuracy as fig09
from dome_lab.paper.figures import load_figure
from dome_lab.paper.figures import tab02_privacy as tab02

SCORES = {"test_accuracy": "test accuracy", "test_macro_f1": "macro-F1"}
WIDE = (-0.1, 0.0, 0.1)
DYNAMICS = {
    "fig01": "test_accuracy",
    "fig02": "test_accuracy",
    "fig06": "test_macro_f1",
}


def verdicts(name, rows):
    return {claim.name: claim.verdict for claim in load_figure(name).judge(rows)}


def verdict(name, rows, words):
    (found,) = [v for claim, v in verdicts(name, rows).items() if words in claim]
    return found


@pytest.mark.parametrize(("name", "score"), DYNAMICS.items())
@pytest.mark.parametrize(
    ("change", "scatter", "expected"),
    [
        (0.00, (-0.002, 0.0, 0.002), HOLDS),
        (0.10, (-0.002, 0.0, 0.002), HOLDS),
        (-0.10, (-0.002, 0.0, 0.002), FAILS),
        (0.00, WIDE, UNDECIDED),
    ],
)
def test_the_score_with_the_filter_must_not_be_lower(
    name, score, change, scatter, expected
):
    rows = two_arms(RUN, {score: 0.5}, {score: 0.5 + change}, scatter)
    assert verdict(name, rows, f"convergence: {SCORES[score]}") == expected


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0, 1.01, 0.99), HOLDS),
        ((1.2, 1.21, 1.19), FAILS),
        ((0.8, 1.05, 1.3), UNDECIDED),
    ],
)
def test_the_loss_with_the_filter_must_not_be_higher(factors, expected):
    loss, rows = np.linspace(2, 1, RUN.epochs), []
    for seed, factor in enumerate(factors):
        mine = replace(RUN, seed=seed)
        rows += training_rows(mine, train_loss=factor * loss)
        rows += training_rows(replace(mine, removes="nothing"), train_loss=loss)
    assert verdict("fig01", rows, "training loss") == expected


def test_a_run_that_is_equal_on_average_but_worse_at_the_end_does_not_hold():
    falling = np.array([0.7, 0.6, 0.5, 0.5, 0.4, 0.3])
    rows = two_arms(RUN, {"test_accuracy": 0.5}, {"test_accuracy": falling})
    assert verdict("fig01", rows, "accuracy") == FAILS


def test_a_filtered_run_that_diverges_does_not_hold():
    loss = np.array([2.0, 3.0, np.nan, np.nan, np.nan, np.nan])
    rows = two_arms(RUN, {}, {"train_loss": loss})
    assert verdict("fig01", rows, "training loss") == FAILS


def test_plain_runs_that_diverge_decide_nothing_and_are_drawn():
    loss = np.array([2.0, 3.0, np.nan, np.nan, np.nan, np.nan])
    rows = two_arms(RUN, {"train_loss": loss}, {})
    rows = [{k: None if v != v else v for k, v in row.items()} for row in rows]
    assert verdict("fig01", rows, "training loss") == UNDECIDED
    assert verdict("fig01", rows, "fraction follows") == UNDECIDED
    load_figure("fig01").draw(rows).draw_without_rendering()


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        (np.linspace(0.9, 0.4, 30), HOLDS),
        (np.linspace(0.4, 0.9, 30), FAILS),
        (None, UNDECIDED),
    ],
)
def test_the_fraction_of_the_plain_run_must_follow_its_loss(fractions, expected):
    rows, run = [], replace(RUN, epochs=30)
    for seed in range(3):
        watching = replace(run, seed=seed, removes="nothing")
        mixed = np.linspace(0.9, 0.4, 30) * (1 if seed else -1)
        mine = mixed if fractions is None else fractions
        rows += training_rows(watching, fraction=mine)
        # The filtered run's own fraction plays no part.
        rows += training_rows(replace(run, seed=seed), fraction=np.linspace(0, 1, 30))
    assert verdict("fig01", rows, "fraction follows loss") == expected


def test_few_epochs_decide_nothing_about_the_fraction():
    rows = two_arms(replace(RUN, epochs=4), {}, {})
    assert verdict("fig01", rows, "fraction follows loss") == UNDECIDED


def test_rho_is_told_of_the_settled_part_and_of_first_differences():
    run = replace(RUN, epochs=40, num_train=12_800)  # a hundred steps an epoch
    fraction = np.concatenate([np.linspace(0.9, 0.1, 15), np.linspace(0.1, 0.5, 25)])
    rows = two_arms(run, {"fraction": fraction}, {})
    (claim,) = [c for c in load_figure("fig01").judge(rows) if "follows" in c.name]
    assert claim.numbers["Spearman's ρ, from step 1,500 on"] == pytest.approx(-1)
    assert -1 < claim.numbers["Spearman's ρ, low"] < claim.numbers["Spearman's ρ"] < 1
    assert "Spearman's ρ, first differences" in claim.numbers


@pytest.mark.parametrize(
    ("kept", "expected"), [(0.3, HOLDS), (0.79, FAILS), (0.5, UNDECIDED)]
)
def test_most_of_the_norm_is_removed_if_less_than_half_is_kept(kept, expected):
    rows = two_arms(RUN, {}, {"kept_norm": kept})
    assert verdict("fig06", rows, "most of the norm") == expected


@pytest.mark.parametrize(("shift", "expected"), [(0.1, HOLDS), (-0.1, FAILS)])
def test_the_fraction_is_compared_between_the_arms(shift, expected):
    fraction = np.linspace(0.8, 0.5, RUN.epochs)
    rows = two_arms(RUN, {"fraction": fraction}, {"fraction": fraction + shift})
    assert verdict("fig02", rows, "fraction higher") == expected


@pytest.mark.parametrize(
    ("change", "expected"), [(0.0, HOLDS), (0.1, FAILS), (-0.1, FAILS)]
)
def test_scores_become_similar_from_either_side(change, expected):
    rows = two_arms(RUN, {}, {"test_macro_f1": 0.5 + change})
    assert verdict("fig06", rows, "becomes similar") == expected


def compressed(task, gains, scatter=(-0.002, 0.0, 0.002)):
    rows, run = [], replace(RUN, task=task)
    for rate, gain in gains.items():
        plain = replace(run, rate=rate, rank=None)
        rows += seeds(plain, [0.0] * 3, test_accuracy=0.5)
        rows += seeds(replace(run, rate=rate), scatter, test_accuracy=0.5 + gain)
    return rows


@pytest.mark.parametrize(
    ("low", "scatter", "expected"),
    [
        (0.0, (-0.002, 0.0, 0.002), HOLDS),
        (0.1, (-0.002, 0.0, 0.002), FAILS),
        (-0.1, (-0.002, 0.0, 0.002), FAILS),
        (0.0, WIDE, UNDECIDED),
    ],
)
def test_low_compression_must_leave_both_arms_equal(low, scatter, expected):
    rows = compressed("mnist", {None: 0.0, 10: low, 1000: 0.3}, scatter)
    assert verdict("fig03", rows, "similar at low compression") == expected


@pytest.mark.parametrize(
    ("high", "scatter", "expected"),
    [
        (0.2, (-0.002, 0.0, 0.002), HOLDS),
        (0.03, (-0.002, 0.0, 0.002), HOLDS),
        (-0.03, (-0.002, 0.0, 0.002), FAILS),
        (0.06, WIDE, UNDECIDED),
    ],
)
def test_high_compression_must_put_the_filter_ahead(high, scatter, expected):
    rows = compressed("mnist", {None: 0.0, 100: 0.2, 1000: high}, scatter)
    assert verdict("fig03", rows, "ahead at rate 1,000") == expected


def test_each_data_set_has_its_own_verdict():
    rows = compressed("mnist", {None: 0.0, 1000: 0.2})
    rows += compressed("cifar10", {None: 0.0, 1000: -0.1})
    assert verdict("fig07", rows, "MNIST: ahead at rate 1,000") == HOLDS
    assert verdict("fig07", rows, "CIFAR-10: ahead at rate 1,000") == FAILS


def by_rank(accuracies, scatter=(-0.002, 0.0, 0.002)):
    run = replace(RUN, rate=1000)
    rows = seeds(replace(run, rank=None), [0.0] * 3, test_accuracy=0.4)
    for rank, accuracy in accuracies.items():
        rows += seeds(replace(run, rank=rank), scatter, test_accuracy=accuracy)
    return rows


def test_ranks_as_in_the_paper_hold():
    rows = by_rank({1: 0.45, 10: 0.55, 100: 0.7, 200: 0.705, 1000: 0.5})
    # The scatter of two filtered arms cancels, so that their difference has no width.
    assert set(verdicts("fig04", rows).values()) == {HOLDS}
    rows = by_rank({1: 0.45, 10: 0.55, 100: 0.7, 200: 0.69, 1000: 0.5})
    assert verdict("fig04", rows, "best near") == HOLDS  # itself the best


def test_ranks_against_the_paper_do_not_hold():
    rows = by_rank({1: 0.35, 10: 0.35, 100: 0.3, 200: 0.5, 1000: 0.8})
    assert set(verdicts("fig04", rows).values()) == {FAILS}


def test_ranks_that_scatter_or_are_missing_decide_nothing():
    assert set(verdicts("fig04", by_rank({1: 0.4, 10: 0.4})).values()) == {UNDECIDED}
    rows = by_rank({1: 0.41, 10: 0.41, 100: 0.41}, WIDE)
    assert verdict("fig04", rows, "gain at small ranks") == UNDECIDED


def test_a_rank_that_gains_nothing_is_not_best_however_equal():
    rows = by_rank({1: 0.4, 10: 0.4, 100: 0.4, 500: 0.4})
    assert verdict("fig04", rows, "best near") == UNDECIDED


def by_batch_size(changes, scatter=(-0.002, 0.0, 0.002)):
    rows = []
    for batch_size, change in changes.items():
        run = replace(RUN, task="cifar10", batch_size=batch_size)
        filtered = {"test_accuracy": 0.5 + change}
        rows += two_arms(run, {"test_accuracy": 0.5}, filtered, scatter)
    return rows


@pytest.mark.parametrize("name", ["fig09", "fig10"])
@pytest.mark.parametrize(
    ("change", "scatter", "expected"),
    [
        (0.0, (-0.002, 0.0, 0.002), HOLDS),
        (-0.1, (-0.002, 0.0, 0.002), FAILS),
        (0.0, WIDE, UNDECIDED),
    ],
)
def test_one_batch_size_decides_over_all(name, change, scatter, expected):
    rows = by_batch_size({4: 0.0, 64: change}, scatter)
    assert verdict(name, rows, "accuracy") == expected


def test_the_best_epoch_is_chosen_after_averaging():
    fig09 = load_figure("fig09")
    run = replace(RUN, epochs=3)
    rows = training_rows(run, test_accuracy=[0.9, 0.5, 0.6])
    rows += training_rows(replace(run, seed=1), test_accuracy=[0.1, 0.5, 0.6])
    found = fig09.best_epoch(rows, "filtered", 128)
    assert found == pytest.approx({0: 0.6, 1: 0.6}, abs=1e-4)


VARIANTS = {
    "IncrementalSVD": {"tracker": "svd"},
    "removed part alone": {"removes": "rest"},
    "removed part exactly": {"removes": "uncoded"},
}


def chosen(accuracies, scatter=(-0.002, 0.0, 0.002)):
    rows = []
    for rate in (100, 1000):
        run = replace(RUN, rate=rate)
        rows += seeds(replace(run, rank=None), [0.0] * 3, test_accuracy=0.3)
        rows += seeds(run, [0.0] * 3, test_accuracy=0.5)
        for name, accuracy in accuracies.items():
            variant = replace(run, **VARIANTS[name])
            rows += seeds(variant, scatter, test_accuracy=accuracy)
    return rows


@pytest.mark.parametrize(
    ("accuracy", "scatter", "expected"),
    [
        (0.5, (-0.002, 0.0, 0.002), HOLDS),
        (0.4, (-0.002, 0.0, 0.002), FAILS),
        (0.5, WIDE, UNDECIDED),
    ],
)
def test_a_variant_must_be_as_good_as_the_papers(accuracy, scatter, expected):
    rows = chosen({"IncrementalSVD": accuracy}, scatter)
    assert verdict("ext00", rows, "IncrementalSVD") == expected


@pytest.mark.parametrize(
    ("alone", "exactly", "expected"),
    [(0.2, 0.5, (HOLDS, HOLDS)), (0.6, 0.6, (FAILS, FAILS))],
)
def test_the_removed_part_is_noise_or_signal(alone, exactly, expected):
    rows = chosen({"removed part alone": alone, "removed part exactly": exactly})
    worse = verdict("ext00", rows, "what is removed trains worse")
    assert (worse, verdict("ext00", rows, "what is removed is noise")) == expected


def test_variants_that_were_not_computed_decide_nothing():
    rows = chosen({})
    assert set(verdicts("ext00", rows).values()) == {UNDECIDED}


@pytest.mark.parametrize(
    ("gain", "scatter", "expected"),
    [
        (0.1, (-0.002, 0.0, 0.002), HOLDS),
        (-0.1, (-0.002, 0.0, 0.002), FAILS),
        (0.01, WIDE, UNDECIDED),
    ],
)
def test_the_filter_must_help_a_compressor_at_every_rate(gain, scatter, expected):
    rows = []
    for rate, here in ((15, 0.2), (100, gain)):
        run = replace(RUN, rate=rate, compressor="topk+feedback")
        plain, filtered = {"test_accuracy": 0.5}, {"test_accuracy": 0.5 + here}
        rows += two_arms(run, plain, filtered, scatter)
    assert verdict("tab01", rows, "top-k") == expected


def privacy_rows(gains, spent=3.0):
    run = replace(
        RUN, epsilon=3.0, max_grad_norm=0.1, rank=10, pretrain=5, optimizer="sgd"
    )
    rows = []
    for arm in tab02.ARMS:
        scatter = (0, 0, 0) if arm.basis is None else (-0.002, 0.0, 0.002)
        # Other seeds are paired with it, so this one may not be the same everywhere.
        scatter = (-0.001, 0.001, 0.0) if arm == tab02.PRETRAINED else scatter
        level = 0.5 + gains.get(arm.name, 0.0)
        found = seeds(arm.of(run), scatter, test_accuracy=level)
        rows += [row | {"spent": spent} for row in found]
    return rows


GAINS = {
    "public basis": 0.1,
    "private basis": -0.1,
    "pre-trained on public": 0.2,
    "pre-trained, public basis": 0.1,
}


def test_a_basis_is_judged_against_none_with_pretraining_and_without():
    found = verdicts("tab02", privacy_rows(GAINS))
    assert found["public basis: more accurate than DP-SGD"] == HOLDS
    assert found["released basis: more accurate than DP-SGD"] == UNDECIDED
    assert found["private basis: more accurate than DP-SGD"] == FAILS
    assert found["pre-trained on public: more accurate than DP-SGD"] == HOLDS
    both = "pre-trained, public basis: more accurate than pre-trained on public"
    assert found[both] == FAILS


@pytest.mark.parametrize(("spent", "expected"), [(2.99, HOLDS), (3.01, FAILS)])
def test_an_epsilon_that_is_exceeded_is_noticed(spent, expected):
    assert verdict("tab02", privacy_rows(GAINS, spent), "spends") == expected


@pytest.mark.parametrize(("level", "expected"), [(0.981, HOLDS), (0.96, FAILS)])
def test_private_training_must_reach_what_the_literature_has(level, expected):
    scatter = (-0.001, 0.0, 0.001)
    rows = seeds(replace(RUN, epsilon=3.0), scatter, test_accuracy=level)
    rows = [row | {"spent": 2.99} for row in rows]
    assert verdict("tab04", rows, "as accurate as it should be") == expected


def test_ewc_is_judged_on_each_stream_by_itself():
    rows = []
    for stream, gain in (("split", 0.1), ("permuted", -0.1)):
        for rank, penalty, level in (
            (None, None, 0.5),
            (None, 1.0, 0.5 + gain),
            (5, None, 0.5),
            (5, 2.0, 0.5 + 2 * gain),
        ):
            run = replace(RUN, stream=stream, rank=rank, penalty=penalty)
            scatter = (0, 0, 0) if rank is None and not penalty else (-0.002, 0, 0.002)
            rows += seeds(run, scatter, test_accuracy=level)
    found = verdicts("tab03", rows)
    assert [v for name, v in found.items() if name.startswith("split")] == [HOLDS] * 3
    assert [v for name, v in found.items() if name.startswith("perm")] == [FAILS] * 3


def test_torchs_momentum_and_the_papers_have_verdicts_of_their_own():
    def arms(optimizer, gain):
        run = replace(RUN, optimizer=optimizer)
        return two_arms(run, {"test_accuracy": 0.5}, {"test_accuracy": 0.5 + gain})

    found = verdicts("fig01", [*arms("sgd", 0.1), *arms("ema", -0.1)])
    name = "does not slow convergence: test accuracy"
    assert found[name] == HOLDS
    assert found[f"averaging momentum: {name}"] == FAILS


def test_batch_sizes_are_compared_after_as_many_epochs():
    rows = []
    for size, epochs in ((4, 3), (16, 10), (64, 8), (256, 8)):
        run = replace(RUN, batch_size=size, epochs=epochs)
        rising = np.linspace(0.1, 0.1 * epochs, epochs)
        rows += two_arms(run, {"test_accuracy": rising}, {"test_accuracy": rising})
    found = {n: fig09.best_epoch(rows, "plain", n)[0] for n in (4, 16, 64, 256)}
    # Made rows differ from each other by some 1e-5.
    assert found == pytest.approx({4: 0.3, 16: 0.8, 64: 0.8, 256: 0.8}, abs=1e-3)


def test_each_way_to_average_has_its_own_verdict_and_parts():
    run = replace(RUN, epochs=40, removes="nothing", num_train=12_800)
    falling = np.linspace(0.9, 0.4, 40)
    rows = seeds(replace(run, optimizer="ema"), fraction=falling)
    rows += seeds(run, fraction=falling[::-1])
    found = verdicts("ext06", rows)
    assert found["MNIST, averaging momentum: whole run"] == HOLDS
    assert found["MNIST, averaging momentum: from step 1,500 on"] == HOLDS
    assert found["MNIST, SGD: whole run"] == FAILS
    assert found["MNIST, SGD: from step 1,500 on"] == FAILS
    assert len(found) == 6
