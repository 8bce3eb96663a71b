import logging

import datasets
import pytest

from dome_lab.paper.tasks import load_task
from dome_lab.paper.tasks.hub import Source, data_folder, load_splits

SOURCE = Source(name="owner/set", inputs="text", labels="kind")
COLUMNS = {"text": ["a", "b"], "kind": [0, 1]}


@pytest.fixture
def whole(write_split):
    return [write_split(SOURCE, split, COLUMNS) for split in ("train", "test")]


def test_splits_come_in_order(whole, folder):
    train, test = load_splits(SOURCE, folder)
    assert list(train["text"]) == list(test["text"]) == ["a", "b"]


def test_nothing_is_printed_and_the_libraries_stay_as_they_were(whole, folder, capfd):
    capfd.readouterr()  # what writing the folder printed
    level = logging.getLogger("datasets").level
    load_splits(SOURCE, folder)
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert logging.getLogger("datasets").level == level


def test_bars_that_were_off_stay_off(whole, folder):
    datasets.disable_progress_bars()
    try:
        load_splits(SOURCE, folder)
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()


def test_the_argument_comes_before_the_variable(tmp_path, monkeypatch):
    assert data_folder(None) is None
    monkeypatch.setenv("DOME_DATA", "")
    assert data_folder(None) is None
    monkeypatch.setenv("DOME_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    assert data_folder(tmp_path / "other") == tmp_path / "other"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no folder \S+/nowhere: .*--data-dir"):
        load_splits(SOURCE, tmp_path / "nowhere")


def test_a_folder_without_the_data_set_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no folder \S+/owner/set: .*owner/set with"):
        load_splits(SOURCE, tmp_path)


def test_the_variables_folder_is_checked_by_tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("DOME_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder .*/ylecun/mnist"):
        load_task("mnist")


def test_an_empty_folder_is_named(folder):
    (folder / SOURCE.name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot load \S+/owner/set: .*as they are"):
        load_splits(SOURCE, folder)


def test_a_file_that_cannot_be_read_is_told(whole, folder):
    whole[0].write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ValueError, match=r"cannot load \S+/owner/set: "):
        load_splits(SOURCE, folder)


def test_a_missing_split_is_named_beside_those_there_are(whole, folder):
    whole[1].unlink()
    with pytest.raises(ValueError, match="no split 'test', only 'train'"):
        load_splits(SOURCE, folder)


@pytest.mark.parametrize("column", ["text", "kind"])
def test_a_missing_column_is_named_beside_those_there_are(write_split, folder, column):
    columns = {("other" if k == column else k): v for k, v in COLUMNS.items()}
    for split in ("train", "test"):
        write_split(SOURCE, split, columns)
    with pytest.raises(ValueError, match=f"no column '{column}', only .*'other'"):
        load_splits(SOURCE, folder)


def test_without_a_folder_and_the_hub_the_way_out_is_told(monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot load owner/set: .*DOME_DATA"):
        load_splits(SOURCE, None)
    assert capfd.readouterr() == ("", "")
