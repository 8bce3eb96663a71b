import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dome
from dome import torch_private

SOURCES = sorted(Path(dome.__file__).parent.rglob("*.py"))

# torch._name, from torch.x._y import, import _name from torch, and attributes that
# torch keeps for itself.
PRIVATE = re.compile(
    r"torch(\.\w+)*\._[a-z]|from torch[\w.]* import \(?.*\b_[a-zA-Z]|\b_C\.|\b_VF\b"
    r"|_forward(_pre)?_hooks\b|_optimizer_step_\w+_hooks|_compiled_call_impl"
    r"|_get_default_\w+|_pytree|_python_dispatch"
)


def private_names(source):
    """Numbers of lines that name what is torch's own: by words, or as an attribute."""
    by_words = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if PRIVATE.search(line.partition("#")[0])
    }
    tree = ast.parse(source)
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    own = {n.attr for n in attributes if owner(n) in ("self", "cls")}
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return by_words | {
        n.lineno
        for n in attributes
        # An attribute that this file itself gives to its objects, or torch_private's.
        if re.match(r"_[a-z]", n.attr)
        and n.attr not in own
        and n.attr != "_replace"  # what named tuples promise
        and owner(n) not in ("self", "cls", "fused")
    }


def owner(attribute):
    return attribute.value.id if isinstance(attribute.value, ast.Name) else None


def test_private_names_of_torch_are_used_in_one_file_only():
    found = [
        f"{file.name}:{number}"
        for file in SOURCES
        if file.name != "torch_private.py"
        for number in sorted(private_names(file.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import x",
        "    torch._foreach_copy_(a, b)",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "hooks = torch._C._autograd.x",
        "model._forward_pre_hooks.values()",
        "x = p._version",
        "x = p.grad._version",
        "x = module._buffers[name]",
        "x = views(t)._base",
    ],
)
def test_a_private_name_would_be_found(line):
    assert private_names(line.strip())


def test_names_of_ones_own_are_no_private_names_of_torch():
    assert not private_names("class A:\n  def f(self, other):\n    self._a = other._a")


def test_a_name_that_a_torch_does_not_have_is_named_when_it_is_needed():
    missing = torch_private._needed(SimpleNamespace(), "_gone")
    with pytest.raises(RuntimeError, match=r"torch \d.* has no _gone"):
        missing()


@pytest.mark.parametrize("nested", [False, True])
def test_the_frame_of_a_checkpoint_is_found_inside_and_nowhere_else(nested):
    frames = []

    def region(x):
        frames.append(torch_private.checkpoint_frame())
        return x.sin()

    def outer(x):
        x = checkpoint(region, x, use_reentrant=False) if nested else region(x)
        frames.append(torch_private.checkpoint_frame())
        return x

    x = torch.ones(2, requires_grad=True)
    assert torch_private.checkpoint_frame() is None
    y = checkpoint(outer, x, use_reentrant=False)
    assert torch_private.checkpoint_frame() is None
    inner, whole = frames
    assert callable(whole.recompute_fn)
    assert (inner is whole) is not nested
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_reentrant_checkpoint_has_no_frame():
    frames = []

    def region(x):
        frames.append(torch_private.checkpoint_frame())
        return x.sin()

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert frames == [None]


def test_vectors_are_cut_into_the_shapes_they_were_made_of():
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
    vector = torch_private.flattened(tensors)
    pieces = torch_private.unflattened(vector, tensors)
    assert all(map(torch.equal, pieces, tensors))
    assert pieces[0].data_ptr() == vector.data_ptr()


def test_a_torch_without_what_is_imported_is_named(monkeypatch):
    monkeypatch.delattr("torch.utils._pytree.tree_map_only")
    with pytest.raises(
        ImportError, match=r"torch .* has no .*tree_map_only.* dome needs"
    ):
        runpy.run_path(torch_private.__file__)


def test_a_tensor_counts_what_was_written_to_it():
    t = torch.zeros(2)
    before = torch_private.version_of(t)
    t.add_(1)
    assert torch_private.version_of(t) == before + 1
    with torch.inference_mode():
        assert torch_private.version_of(torch.zeros(2)) == 0


def test_tensors_of_one_memory_have_one_key():
    t = torch.zeros(2, 3)
    keys = {torch_private.storage_key(s) for s in (t, t[0], t.detach(), t.data)}
    assert len(keys) == 1
    assert torch_private.storage_key(t.clone()) not in keys
    assert torch_private.storage_key(t.to_sparse()) is None
