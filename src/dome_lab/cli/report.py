"""``dome report``: runs side by side on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dome_lab.cli.screen import (
    UserError,
    check_folder,
    one_line_errors,
    show_path,
    tell,
    users_values,
)
from dome_lab.interrupts import working

MANY = 2  # sections that are named in the title


def command(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_ROWS...",
            help="Files of rows (JSON lines or CSV), or folders that have them.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; report.html beside the first rows by default."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a file that is no report."),
    ] = False,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The run without a filter, if its rows do not say so."),
    ] = None,
) -> None:
    """Write one HTML page that compares runs, and needs no network.

    Takes what dome demo, dome reproduce and dome train wrote, and rows of your own.
    """
    with one_line_errors(context, "no page was written"):
        from dome_lab.paper.rows import check_apart, check_own, is_page
        from dome_lab.report.page import REPORT_FILE, write_report
        from dome_lab.report.sections import file_sections, read_by

        if out is None:
            first = paths[0]
            out = (first if first.is_dir() else first.parent) / REPORT_FILE
        with working(), users_values():
            sections = file_sections(paths, baseline)
        tell(note for section in sections for note in section.notes)
        if out.is_dir():
            raise UserError(f"--out {out} is a folder: give a file")
        check_folder(out.absolute().parent)
        with users_values():
            check_apart(out, read_by(paths))
            if not force:
                check_own(out, is_page, way_out=", or add --force")
        names = list(dict.fromkeys(section.name for section in sections))
        what = f"{len(names)} figures" if len(names) > MANY else ", ".join(names)
        with working():
            write_report(out, title or f"dome report: {what}", sections)
        show_path(out)
