from io import StringIO

from rich.console import Console

from dome_lab.cli.progress import simple_bar


def test_a_bar_tells_what_is_expected_before_it_knows_its_speed():
    bar = simple_bar(90.0)
    bar.add_task("starting", total=100)
    text = StringIO()
    Console(file=text, width=80).print(bar.get_renderable())
    assert "0% 0:01:30 starting" in " ".join(text.getvalue().split())
    assert "-:--:--" not in text.getvalue()
