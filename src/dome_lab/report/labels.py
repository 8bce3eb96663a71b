"""Names of runs: what sets them apart, and nothing else.

Settings fall into two: those of the filter make an arm, all others a setting in which
arms are compared.
"""

from collections.abc import Mapping, Sequence

Settings = Mapping[str, object]

RUN, MADE_BY = "run", "made_by"
FILTERED = "filtered"  # of a loop of one's own: whether it had a filter

_FILTERS = ("rank", "removes", "tracker", "forget")
ARM_FIELDS = (
    RUN,
    FILTERED,
    *_FILTERS,
    "update_every",
    "layout",
    "oversample",
    "direction_rank",
)
NO_FILTER = "no filter"
_KEPT = {
    "span": "filter",
    "rest": "only the subspace kept",
    "uncoded": "filter, subspace sent exactly",
    "hessian": "Hessian's outliers removed",
}
_WORDS = {
    "batch_size": "batch {}",
    "epochs": "{} epochs",
    "lr": "learning rate {}",
    "num_train": "{} training samples",
    "num_test": "{} test samples",
    "num_classes": "{} classes",
    "forget": "forget {}",
    "tracker": "tracker {}",
    "layout": "{}",
    "oversample": "oversample {}",
    "direction_rank": "directions of rank {}",
    MADE_BY: "{}",
}


def is_plain(settings: Settings) -> bool:
    """Whether these are settings of a run that takes nothing out of the gradient."""
    if RUN in settings:
        return settings.get(FILTERED) is False
    return settings.get("rank") is None or settings.get("removes") == "nothing"


def other_fields(settings: Settings) -> Settings:
    """All that is not done to the gradient."""
    return {name: v for name, v in settings.items() if name not in ARM_FIELDS}


def varying(all_settings: Sequence[Settings]) -> list[str]:
    """The fields in which some settings differ, in the order they have."""
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    return [
        name for name in names if len({repr(s.get(name)) for s in all_settings}) > 1
    ]


def arm_name(settings: Settings, all_settings: Sequence[Settings]) -> str:
    """What is done to the gradient, in words that tell it from the others."""
    if RUN in settings:
        return str(settings[RUN])
    rank, removes = settings.get("rank"), str(settings.get("removes"))
    if is_plain(settings):
        plain = [s for s in all_settings if is_plain(s)]
        watched = rank is not None and len({repr(s.get("rank")) for s in plain}) > 1
        return f"{NO_FILTER}, watched at rank {rank}" if watched else NO_FILTER
    parts = [f"{_KEPT.get(removes, removes)}, rank {rank}"]
    others = [s for s in all_settings if not is_plain(s) and RUN not in s]
    different = [name for name in varying(others) if name in ARM_FIELDS]
    for name in different:
        if name not in ("rank", "removes"):
            parts.append(_field(name, settings.get(name)))
    return ", ".join(part for part in parts if part)


def other_name(settings: Settings, all_settings: Sequence[Settings]) -> str:
    """Under which settings, in words that tell them from the others; may be empty."""
    different = [name for name in varying(all_settings) if name not in ARM_FIELDS]
    # The model follows from the task nearly always.
    if {"task", "model"} <= set(different):
        pairs = {(repr(s.get("task")), repr(s.get("model"))) for s in all_settings}
        if len(pairs) == len({task for task, _ in pairs}):
            different.remove("model")
    parts = [_field(name, settings.get(name)) for name in different]
    return ", ".join(part for part in parts if part)


def _field(name: str, value: object) -> str:
    """A setting in words; nothing for one that is not set."""
    if name == "rate":
        return "no compression" if value is None else f"rate {shown(value)}"
    if name == "update_every":
        return "" if value == 1 else f"updated every {shown(value)} steps"
    if value is None or (name == "oversample" and value == 0):
        return ""
    if isinstance(value, str) and name not in _WORDS:
        return value.replace("_", " ")
    words = _WORDS.get(name, name.replace("_", " ") + " {}")
    return words.format(shown(value))


def shown(value: object) -> str:
    """A value as a reader expects it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
