import torch

from dome_lab.paper.tasks.texts import (
    CLS,
    LENGTH,
    PADDING,
    UNKNOWN,
    build_vocabulary,
    encode,
    split_words,
)


def test_words_are_letters_and_digits_in_lower_case():
    text = "Billy Cole (9 August 1909), España's: d'Italia!"
    expected = ["billy", "cole", "9", "august", "1909", "españa", "s", "d", "italia"]
    assert split_words(text) == expected


def test_texts_without_words_have_none():
    for text in (None, "", "  \n", "--- !"):
        assert split_words(text) == []


def test_frequent_words_come_first_and_equals_by_the_alphabet():
    texts = [split_words("b a c c"), split_words("a b d c")]
    assert build_vocabulary(texts, size=100) == {"c": 3, "a": 4, "b": 5}


def test_the_vocabulary_is_cut_to_its_size():
    texts = [split_words("b a c c"), split_words("a b d c")]
    assert build_vocabulary(texts, size=5) == {"c": 3, "a": 4}


def test_texts_become_numbers_behind_cls():
    numbers = encode([["a", "x", "b"], []], {"a": 3, "b": 4})
    assert numbers.shape == (2, LENGTH)
    assert numbers.dtype == torch.int64
    assert numbers[0, :4].tolist() == [CLS, 3, UNKNOWN, 4]
    assert numbers[1, 0] == CLS
    assert (numbers[0, 4:] == PADDING).all()
    assert (numbers[1, 1:] == PADDING).all()


def test_long_texts_are_cut():
    numbers = encode([split_words("a " * 500)], {"a": 3})
    assert numbers.tolist() == [[CLS] + [3] * (LENGTH - 1)]
