import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import dome


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_every_public_name_can_be_reached():
    for name in dome.__all__:
        assert getattr(dome, name).__doc__
    assert dir(dome) == dome.__all__


def test_a_name_that_does_not_exist_is_an_attribute_error():
    assert run("import dome; print(hasattr(dome, 'attatch'))") == "False"


def test_importing_the_library_needs_torch_alone():
    heavy = "{'numpy', 'scipy', 'sklearn', 'matplotlib', 'typer', 'rich', 'opacus'}"
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import dome; [getattr(dome, name) for name in dome.__all__]\n"
        f"print(sorted({heavy} & (set(sys.modules) - before)))"
    )
    assert run(code) == "[]"


def test_a_function_keeps_its_name_after_its_module_was_imported():
    code = (
        "import dome.attachment, dome.planning.training, dome.verification, dome\n"
        "print(callable(dome.attach), callable(dome.plan), callable(dome.verify))"
    )
    assert run(code) == "True True True"


def class_names():
    for path in Path(dome.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        yield from (n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))


def test_no_two_classes_have_one_name():
    counted = Counter(class_names())
    assert len(counted) > 100
    assert [name for name, number in counted.items() if number > 1] == []
