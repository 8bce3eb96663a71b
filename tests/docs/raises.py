import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "dome"
# One line each, naming the option and the way out; `dome --debug` shows the rest.
COMMANDS = ("cli", "bench", "paper", "report")
HOLE = "…"


def messages():
    """Every message that the library raises, by the place where it is raised."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(_files())}
    sentences = {}
    for tree in trees.values():
        sentences |= _sentences(tree)
    return {
        f"{path.relative_to(SOURCE)}:{node.lineno}": _message(node.exc, sentences)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        # `raise` alone, or of a variable, passes on what was raised elsewhere.
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }


def _files():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in COMMANDS:
            yield path


def _sentences(tree):
    """What functions return, by name: `raise ValueError(mixes_samples(name))`."""
    return {
        node.name: statement.value
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Return)
    }


def _message(error, sentences):
    name = error.func.attr if isinstance(error.func, ast.Attribute) else error.func.id
    if name[0].islower():
        return _message(sentences[name], sentences)
    return _text(error.args[0], sentences) if error.args else name


def _text(node, sentences):
    match node:
        case ast.Constant(value=str()):
            return node.value
        case ast.JoinedStr():
            return "".join(_text(part, sentences) for part in node.values)
        case ast.BinOp(op=ast.Add()):
            return _text(node.left, sentences) + _text(node.right, sentences)
        case ast.Call(func=ast.Name(id=name)) if name in sentences:
            return _text(sentences[name], sentences)
        case _:
            return HOLE
