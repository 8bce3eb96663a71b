from dome_lab.report.train_text import heading, line

ROW = {
    "epoch": 3,
    "train_loss": 0.12345,
    "test_loss": None,
    "test_accuracy": 0.9,
    "test_macro_f1": 0.5,
    "kept_norm": 0.25,
    "fraction": None,
    "seconds": 1.26,
}


def test_numbers_stand_under_their_headings():
    assert len(line(ROW)) == len(heading())
    assert line(ROW).split() == [
        *("3", "0.1235", "-", "90.00%", "0.5000", "0.250", "-", "1.3")
    ]
