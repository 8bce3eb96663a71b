"""DOME: removes nuisance directions from stochastic gradients (arXiv:2507.03545).

    import dome
    grad_filter = dome.attach(model, optimizer, rank=100)

Names are loaded when they are first used, so that `dome --help` does not wait for
torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dome import (
        compression,
        continual,
        curvature,
        diagnostics,
        distributed,
        privacy,
        reference,
        testing,
    )
    from dome.attachment import attach
    from dome.filter import GradientFilter
    from dome.planning import (
        Plan,
        Suggestion,
        WorkersPlan,
        plan,
        plan_workers,
        suggest,
    )
    from dome.recording import Recorder
    from dome.samples import per_sample_gradients, sample_gradients, sample_rule
    from dome.trackers import IncrementalSVD, StreamingPower
    from dome.verification import Report, verify

_HOMES = {
    "GradientFilter": "dome.filter",
    "IncrementalSVD": "dome.trackers",
    "Plan": "dome.planning",
    "Recorder": "dome.recording",
    "Report": "dome.verification",
    "StreamingPower": "dome.trackers",
    "Suggestion": "dome.planning",
    "WorkersPlan": "dome.planning",
    "attach": "dome.attachment",
    "compression": "dome.compression",
    "continual": "dome.continual",
    "curvature": "dome.curvature",
    "diagnostics": "dome.diagnostics",
    "distributed": "dome.distributed",
    "per_sample_gradients": "dome.samples",
    "plan": "dome.planning",
    "plan_workers": "dome.planning",
    "privacy": "dome.privacy",
    "reference": "dome.reference",
    "sample_rule": "dome.samples",
    "suggest": "dome.planning",
    "testing": "dome.testing",
    "sample_gradients": "dome.samples",
    "verify": "dome.verification",
}

__all__ = [
    "GradientFilter",
    "IncrementalSVD",
    "Plan",
    "Recorder",
    "Report",
    "StreamingPower",
    "Suggestion",
    "WorkersPlan",
    "attach",
    "compression",
    "continual",
    "curvature",
    "diagnostics",
    "distributed",
    "per_sample_gradients",
    "plan",
    "plan_workers",
    "privacy",
    "reference",
    "sample_gradients",
    "sample_rule",
    "suggest",
    "testing",
    "verify",
]


# Another package on the index is named `dome` and installs these files into our folder.
_FOREIGN = [
    name for name in ("dome.py", "utils.py") if Path(__file__).with_name(name).exists()
]
if _FOREIGN:
    raise ImportError(
        f"{Path(__file__).parent} also has files of another package named dome "
        f"({', '.join(_FOREIGN)}), so both are broken: pip uninstall dome dome-torch, "
        f"then pip install dome-torch, and keep the other in its own environment"
    )


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dome' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    # Some names, such as `compression`, are modules themselves.
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return __all__
