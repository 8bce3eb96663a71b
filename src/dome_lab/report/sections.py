"""The sections of a report: of files, of the demo, of the paper's figures."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from dome_lab.paper import demo, figures
from dome_lab.paper.figures import short_name
from dome_lab.paper.reproduce import make_plan
from dome_lab.report.labels import RUN, is_plain, other_fields
from dome_lab.report.sources import (
    Section,
    Trial,
    known_trials,
    noted_beside,
    read_claims,
    read_facts,
    read_source,
    without_chosen,
)


def demo_section(plan: demo.Plan) -> Section:
    """The runs of the demo, and no others that are in its file."""
    runs = {job.key: plan.found[job.key] for job in plan.jobs}
    caption = (
        f"ResNet-8 on 16x16 digits, Adam, a Gaussian sketch of the gradient; "
        f"the filter removes {plan.config.rank} directions."
    )
    facts = read_facts(plan.path)
    return without_chosen(Section("demo", caption, known_trials(runs), facts))


def figure_sections(folder: Path, scale: str) -> list[Section]:
    """One section for every figure of which all runs of a part are in a folder.

    Figures share runs on disk, so a figure's own file may lack some of them.

    Args:
        folder: The folder of a scale.
        scale: Its name.
    """
    modules = {name: figures.load_figure(name) for name in figures.figure_names()}
    modules = {name: m for name, m in modules.items() if scale in m.SCALES}
    plan = make_plan(modules, scale, folder)
    claims = read_claims(folder)
    sections = []
    for figure in plan.figures:
        parts = figure.parts(plan.found)
        if not parts.num_ready:
            continue
        runs = {job.key: plan.found[job.key] for job in parts.jobs}
        notes = [*parts.notes]
        mine = [c for c in claims if short_name(c.figure) == short_name(figure.name)]
        sections.append(
            without_chosen(
                Section(
                    figure.name,
                    figures.caption(figure.name),
                    known_trials(runs),
                    read_facts(figure.rows_path),
                    mine,
                    notes=notes,
                )
            )
        )
    return sections


def file_sections(paths: Sequence[Path], baseline: str | None = None) -> list[Section]:
    """The sections of files and folders of rows.

    Rows of a figure are a section of their own. All other files are one section, so
    that their runs stand side by side.

    Args:
        paths: Of files and folders.
        baseline: The run without a filter among those of a loop of one's own.
    """
    read = [without_chosen(read_source(path, baseline)) for path in _files(paths)]
    loose = [section for section in read if "figure" not in section.facts]
    figures = [section for section in read if "figure" in section.facts]
    _check_baseline(baseline, loose)
    figures = _with_counterparts(sorted(figures, key=_papers_first))
    return ([_merged(loose)] if loose else []) + figures


def _check_baseline(baseline: str | None, sections: Sequence[Section]) -> None:
    names = [str(t.settings.get(RUN)) for s in sections for t in s.trials]
    if baseline is not None and baseline not in names:
        raise ValueError(
            f"no run is called {baseline!r}: --baseline takes one of "
            f"{', '.join(dict.fromkeys(names))}"
        )


def read_by(paths: Sequence[Path]) -> list[Path]:
    """The files that a report of these paths is made of."""
    rows = _files(paths)
    return [file for path in rows for file in (path, *noted_beside(path))]


def _files(paths: Sequence[Path]) -> list[Path]:
    """The files of rows meant by these paths, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            patterns = ("*.jsonl", "*/*.jsonl", "*.csv")
            found_by = (sorted(path.glob(pattern)) for pattern in patterns)
            inside = next(filter(None, found_by), [])
            if not inside:
                raise ValueError(
                    f"no files of rows (*.jsonl or *.csv) in the folder {path}"
                )
        elif path.exists():
            inside = [path]
        else:
            raise ValueError(f"no file or folder {path}{_nearest(path)}")
        found |= {one.resolve(): one for one in inside}
    return list(found.values())


def _nearest(path: Path) -> str:
    folder = path.parent
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return f": did you mean {folder / near[0]}?" if near else ""


def _with_counterparts(sections: Sequence[Section]) -> list[Section]:
    """Figures share runs on disk: lend each the unfiltered ones that it lacks."""
    plain: dict[str, list[Trial]] = {}
    for trial in (trial for section in sections for trial in section.trials):
        if trial.known and is_plain(trial.settings):
            plain.setdefault(_outside(trial), []).append(trial)
    complete = []
    for section in sections:
        there = {_outside(t) for t in section.trials if is_plain(t.settings)}
        wanted = dict.fromkeys(map(_outside, section.trials))
        lent = [t for key in wanted if key not in there for t in plain.get(key, [])]
        complete.append(replace(section, trials=section.trials + lent))
    return complete


def _outside(trial: Trial) -> str:
    return repr(sorted(other_fields(trial.settings).items()))


def _merged(sections: Sequence[Section]) -> Section:
    """One section of all the runs; of one that is there twice, the first."""
    if len(sections) == 1:
        return sections[0]
    trials = {
        (tuple(sorted((k, repr(v)) for k, v in t.settings.items())), t.seed): t
        for section in reversed(sections)
        for t in reversed(section.trials)
    }
    return Section(
        "Runs",
        ", ".join(section.name for section in sections),
        list(reversed(trials.values())),
        {"made_with": list(_chain(s.facts.get("made_with") for s in sections))},
        [claim for section in sections for claim in section.claims],
        [line for section in sections for line in section.files],
        [note for section in sections for note in section.notes],
    )


def _chain(lists: Iterable[object]) -> Iterable[object]:
    return (entry for one in lists if isinstance(one, list) for entry in one)


def _papers_first(section: Section) -> tuple[bool, str]:
    return section.name.startswith("ext"), section.name
