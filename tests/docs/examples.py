"""Examples of the docs that others may copy, by the names that they define."""

import torch
from docs.pages import DOCS, blocks
from torch import nn

import dome


def example(page, name):
    """What a page's code calls by this name."""
    (source,) = [
        b
        for b in blocks((DOCS / page).read_text())
        if f"class {name}(" in b or f"class {name}:" in b
    ]
    names = {"torch": torch, "nn": nn, "dome": dome, "model": nn.Linear(3, 2)}
    names |= vars(dome.testing)
    exec(compile(source, page, "exec"), names)
    return names[name]
