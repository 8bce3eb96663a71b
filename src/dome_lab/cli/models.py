"""Models by name: those of the experiments, or anybody's by import path."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from dome_lab.cli.screen import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from torch import nn

BUILT_IN = ("resnet8", "resnet18", "transformer")
CHANNELS, CLASSES = 3, 10  # of the images that the networks are made for
TEXT_CLASSES = 70  # of DBPedia-Classes


def load_model(name: str) -> nn.Module:
    """A model, built in or ``package.module:factory``; mistakes are the user's."""
    if ":" in name:
        return _made(name)
    if name not in BUILT_IN:
        hint = _nearest(name, BUILT_IN) or "."
        raise UserError(
            f"no model {name!r}{hint} There are {', '.join(BUILT_IN)}; a model of your "
            "own is package.module:factory"
        )
    return _built_in(name)


def _built_in(name: str) -> nn.Module:
    from dome_lab.paper.models.resnet8 import resnet8
    from dome_lab.paper.models.resnet18 import resnet18
    from dome_lab.paper.models.transformer import Transformer
    from dome_lab.paper.tasks import DBPEDIA_VOCABULARY

    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet8": lambda: resnet8(CHANNELS, CLASSES),
        "resnet18": lambda: resnet18(CHANNELS, CLASSES),
        "transformer": lambda: Transformer(DBPEDIA_VOCABULARY, TEXT_CLASSES),
    }
    return makers[name]()


def _made(path: str) -> nn.Module:
    from torch import nn

    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise UserError(f"{path!r} is no import path: write package.module:factory")
    with _here():
        module = _module(module_name)
        if not hasattr(module, attribute):
            names = [name for name in vars(module) if not name.startswith("_")]
            hint = _nearest(attribute, names)
            raise UserError(f"{module_name} has no {attribute!r}{hint}")
        found = getattr(module, attribute)
        made = found if isinstance(found, nn.Module) else _called(path, found)
    if not isinstance(made, nn.Module):
        raise UserError(f"{path} gave a {type(made).__name__}, not a torch.nn.Module")
    return made


def _module(name: str) -> ModuleType:
    """Import package after package, so that the first one missing can be named."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        try:
            module = import_module(part)
        except ModuleNotFoundError as error:
            if error.name != part:  # something that it needs itself
                raise UserError(
                    f"importing {part} failed: {error.name} is missing"
                ) from error
            siblings = iter_modules(module.__path__) if end > 1 else iter_modules()
            hint = _nearest(parts[end - 1], [sibling.name for sibling in siblings])
            raise UserError(f"no module {part!r}{hint}") from error
        except Exception as error:
            raise UserError(f"importing {part} failed: {_words(error)}") from error
        if end < len(parts) and not hasattr(module, "__path__"):
            raise UserError(f"{part} is a module, not a package: no {name!r} in it")
    return module


def _called(path: str, factory: object) -> object:
    if not callable(factory):
        kind = type(factory).__name__
        raise UserError(f"{path} is a {kind}: give a function that makes a model")
    try:
        return factory()
    except Exception as error:
        raise UserError(
            f"{path}() failed: {_words(error)}; it is called without arguments"
        ) from error


@contextmanager
def _here() -> Iterator[None]:
    """Modules of the current folder are found too, as by ``python -m``."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else "."


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
