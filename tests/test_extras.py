import json
import subprocess
import sys

EXTRAS = (
    *("numpy", "scipy", "opacus", "lightning", "transformers", "accelerate", "peft"),
    *("tensorboard", "typer", "rich", "matplotlib", "sklearn", "datasets", "jinja2"),
    "PIL",
)
# Modules that cannot be imported with torch alone, and what they lack.
NEEDS = {
    "dome.integrations.lightning": "lightning",
    "dome.integrations.transformers": "transformers",
}
CODE = """
import importlib, json, pkgutil, sys, warnings

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

EXTRAS = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Blocked())
warnings.simplefilter("ignore")  # torch says that numpy is not there
import dome
lacking, names = {}, ["dome"]
for found in pkgutil.walk_packages(dome.__path__, "dome.", onerror=lambda name: None):
    names.append(found.name)
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking[name] = error.name.partition(".")[0]
assert not EXTRAS & set(sys.modules), EXTRAS & set(sys.modules)
print(json.dumps([names, lacking]))
"""


def test_every_module_needs_torch_alone_or_the_extra_it_is_listed_with():
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(EXTRAS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, lacking = json.loads(done.stdout)
    assert {"dome.filter", "dome.planning.units", "dome.privacy"} <= set(names)
    assert lacking == NEEDS
