from typer.testing import CliRunner

from dome.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_plan_for_several_numbers_of_workers():
    result = run("--parameters", "1e9", "--rank", 50, "--workers", 8, "--workers", 64)
    assert result.exit_code == 0, result.output
    assert "1,000,000,000 parameters, rank 50, 8 workers" in result.output
    assert "64 workers" in result.output
    assert 'attach(model, optimizer, rank=50, samples="worker")' in result.output


def test_a_plan_for_a_model_on_this_machine():
    result = run("--model", "resnet8", "--rank", 4, "--batch-size", 8)
    assert result.exit_code == 0, result.output
    assert "78,042 parameters, rank 4, batches of 8" in result.output


def test_what_cannot_be_planned_is_one_line():
    for arguments in (
        (),
        ("--parameters", "1e9"),
        ("--parameters", "many", "--workers", 2),
        ("--model", "resnet8", "--rank", 10**9, "--workers", 2),
        ("--model", "lenet", "--workers", 2),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.output.startswith("dome: ")
        assert result.output.count("\n") == 1
