"""What dome demo and dome reproduce computed, as sections of a report."""

from pathlib import Path

from dome.paper import demo, figures
from dome.paper.figures import short_name
from dome.paper.reproduce import make_plan
from dome.report.sources import Section, known_trials, read_claims, read_facts


def demo_section(plan: demo.Plan) -> Section:
    """The runs of the demo, and no others that are in its file."""
    runs = {job.key: plan.found[job.key] for job in plan.jobs}
    caption = (
        f"ResNet-8 on 16x16 digits, Adam, a Gaussian sketch of the gradient; "
        f"the filter removes {plan.config.rank} directions."
    )
    return Section("demo", caption, known_trials(runs), read_facts(plan.path))


def figure_sections(folder: Path, scale: str) -> list[Section]:
    """One section for every figure of which all runs are in a folder.

    Figures share runs on disk, so a figure's own file may lack some of them.

    Args:
        folder: The folder of a scale.
        scale: Its name.
    """
    modules = {name: figures.load_figure(name) for name in figures.figure_names()}
    plan = make_plan(modules, scale, folder)
    claims = read_claims(folder)
    sections = []
    for figure in plan.figures:
        if figure.num_missing(plan.found):
            continue
        runs = {job.key: plan.found[job.key] for job in figure.jobs}
        mine = [c for c in claims if short_name(c.figure) == short_name(figure.name)]
        sections.append(
            Section(
                figure.name,
                figures.caption(figure.name),
                known_trials(runs),
                read_facts(figure.rows_path),
                mine,
            )
        )
    return sections
