"""What can be known of a block without running it: names, options, arguments, files. Each check raises AssertionError.

python    compiles; what it imports of paceline is there, and so are keywords of `Engine(…)` and names of `engine.…`
shell     every program is known; `paceline` parses its options; scripts exist and know their flags; make has the target
yaml      options of `paceline run`, arguments of a Trainer, or an object of Kubernetes
toml      a scenario of `paceline simulate`
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import paceline
from paceline.trainer.training_arguments import SupportedFields
from tests.docs.blocks import ROOT

ELSEWHERE = {"train.py", "script.py", "finetune.py"}
"""Scripts of the reader's."""

PROGRAMS = set(
    re.findall(
        r"\S+",
        """kill pgrep openssl mkdir cd grep export echo . source pip git set tail cat ls rm cp scp ssh wc head tee sleep
        srun sbatch salloc scontrol kubectl docker mpirun mpiexec accelerate pre-commit uv curl diff cmp sha256sum
        jupyter mkdocs pytest ruff mypy lint-imports""",
    )
)
SHELL_WORDS = {"do", "done", "then", "fi", "else", "!", "{", "}"}


def check_python(code: str) -> None:
    tree = ast.parse(code)
    aliases: dict[str, Any] = {"paceline": paceline, "engine": paceline.Engine}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                aliases[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "paceline":
                    importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _resolved(node, aliases)
        if isinstance(node, ast.Call) and (called := _resolved(node.func, aliases)) is not None:
            _check_keywords(called, node)


def _resolved(node: ast.expr, aliases: dict[str, Any]) -> Any:
    """The object of paceline that an expression such as `paceline.data.TokenFile` names, or None."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if not isinstance(node, ast.Attribute) or (owner := _resolved(node.value, aliases)) is None:
        return None
    if inspect.ismodule(owner) or owner is paceline.Engine:
        found = getattr(owner, node.attr, None)
        if found is None and owner is paceline.Engine:
            assert node.attr in _instance_names(), f"an Engine has no {node.attr}"
            return None
        assert found is not None, f"{owner.__name__} has no {node.attr}"
        return found if callable(found) or inspect.ismodule(found) else None
    return None


@functools.cache
def _instance_names() -> frozenset[str]:
    """What `Engine.__init__` sets."""
    return frozenset(re.findall(r"self\.(\w+)\s*[:=]", inspect.getsource(paceline.Engine)))


def _check_keywords(called: Any, call: ast.Call) -> None:
    parameters = inspect.signature(called).parameters
    known = set(parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_any &= called is not paceline.Engine  # which takes any in order to say what it doesn't know
    if called is paceline.TrainingArguments:
        known, takes_any = known | _training_arguments(), False
    for keyword in call.keywords:
        assert keyword.arg is None or takes_any or keyword.arg in known, (
            f"{called.__qualname__}() has no {keyword.arg}="
        )


def check_shell(code: str) -> None:
    for words in simple_commands(code):
        check_command(words)


def simple_commands(code: str) -> list[list[str]]:
    """The commands of a script, each as its words; what is inside `$(…)` is a command of its own."""
    inner = [found for line in code.splitlines() for found in re.findall(r"\$\(([^()]+)\)", line)]
    outer = re.sub(r"\"?\$\([^()]+\)\"?", "SUBSTITUTED", code.replace("\\\n", " "))
    commands: list[list[str]] = []
    for line in [*outer.splitlines(), *inner]:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "$:,%{}@[]!+^"
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&()"):
                commands.append(command)
                command = []
            else:
                command.append(word)
    return [stripped for command in commands if (stripped := _stripped(command))]


def _stripped(command: list[str]) -> list[str]:
    """Without the shell's own words, variables that are set, and where output goes."""
    while command and (command[0] in SHELL_WORDS or re.match(r"[A-Z_]+=", command[0])):
        command = command[1:]
    if command[:1] == ["for"]:
        return []
    for sign in (">", ">>", "<", "2>"):
        if sign in command:
            command = command[: command.index(sign)]
    return command


def check_command(words: list[str]) -> None:
    program, *arguments = words
    name = Path(program).name or program
    if name == "paceline":
        _check_paceline(arguments)
    elif name in ("python", "python3"):
        _check_python_call(arguments)
    elif name == "torchrun":
        script = next(i for i, word in enumerate(arguments) if word.endswith(".py"))
        check_script(arguments[script], arguments[script + 1 :])
    elif name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        for word in arguments:
            assert "=" in word or word.startswith("-") or word in targets, f"make has no target {word}"
    elif program.endswith((".sh", ".py")):
        assert (ROOT / program).exists(), f"there is no {program}"
    else:
        assert name in PROGRAMS, f"{program!r} is no program that a page may use: {words}"
        if program in ("srun", "mpirun", "mpiexec"):
            inner = next((i for i, w in enumerate(arguments) if Path(w).name in ("python", "paceline")), None)
            if inner is not None:
                check_command(arguments[inner:])


def _check_python_call(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        assert importlib.util.find_spec(module), f"there is no module {module}"
    elif arguments and not arguments[0].startswith("-"):
        check_script(arguments[0], arguments[1:])


def _check_paceline(arguments: list[str]) -> None:
    if {"--help", "-h", "--version"} & set(arguments):
        return
    shown = f"paceline {shlex.join(arguments)}"
    command, path = _command(()), ()
    try:
        while hasattr(command, "list_commands"):
            assert arguments, f"{shown}: which verb?"
            path, arguments = (*path, arguments[0]), arguments[1:]
            command = _command(path)
            assert command is not None, f"{shown}: there is no verb {path[-1]!r}"
        values = command.make_context(path[-1], list(arguments)).params
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: an option that is not known, a value of another type
            raise AssertionError(f"{shown}: {error.format_message()}") from error
        raise
    _check_values(values, shown)


@functools.cache
def _command(path: tuple[str, ...]) -> Any:
    """The verb behind `paceline checkpoint list` and the like."""
    import typer

    from paceline.cli.main import app

    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.get_command(command.make_context("paceline", [], resilient_parsing=True), name)
    return command


def _check_values(values: dict[str, Any], shown: str) -> None:
    from paceline.world import known_names

    known = {
        "strategy": {known_names.AUTO, *known_names.STRATEGIES},
        "strategies": {known_names.AUTO, *known_names.STRATEGIES},
        "backend": set(known_names.BACKENDS),
        "precision": set(known_names.PRECISIONS),
    }
    for option, names in known.items():
        for name in str(values.get(option) or "").split(","):
            if re.fullmatch(r"[a-z_0-9]+", name):
                assert name in names, f"{shown}: {name!r} is no {option}"
    script, rest = values.get("script"), [str(word) for word in values.get("arguments") or ()]
    if script and not values.get("module"):
        check_script(str(script), rest)
    if values.get("job"):
        _check_paceline([str(word) for word in values["job"]])


def check_script(script: str, arguments: list[str]) -> None:
    """A script of the repository exists, and knows the flags it is given."""
    if script in ELSEWHERE or script.startswith("$") or script in ("SCRIPT", "your_script.py"):
        return
    path = ROOT / script.removeprefix("../")
    assert path.is_file(), f"there is no {script} in the repository; scripts of the reader's are {sorted(ELSEWHERE)}"
    flags = _flags_of(path)
    for word in arguments:
        if word.startswith("--"):
            assert word.split("=")[0] in flags, f"{script} knows no {word}"


@functools.cache
def _flags_of(path: Path) -> frozenset[str]:
    source = path.read_text()
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    flags = {text for text in texts if isinstance(text, str) and text.startswith("--")}
    flags |= {f"--no-{flag[2:]}" for flag in flags if "BooleanOptionalAction" in source}
    if "TrainingArguments" in source:
        names = [name.replace("_", "-") for name in _training_arguments()]
        flags |= {f"--{name}" for name in names} | {f"--no-{name}" for name in names} | {"--config"}
    return frozenset(flags)


@functools.cache
def _training_arguments() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(SupportedFields))


def check_yaml(code: str) -> None:
    import yaml

    for document in yaml.safe_load_all(code):
        assert isinstance(document, dict), "a page's YAML is a mapping"
        keys = {str(key).replace("-", "_") for key in document}
        known = {"options of paceline run": _run_options(), "TrainingArguments": _training_arguments()}
        if "apiVersion" in keys:
            continue
        missing = {name: sorted(keys - options) for name, options in known.items()}
        assert any(not words for words in missing.values()), f"not known: {missing}"


@functools.cache
def _run_options() -> frozenset[str]:
    return frozenset(parameter.name for parameter in _command(("run",)).params)


def check_toml(code: str) -> None:
    from paceline.simulate.scenario import scenario_of

    told = tomllib.loads(code)
    if "workers" not in told:
        return
    several = told.pop("scenario", [{}])
    for one in several:
        scenario_of({**told, **one})


CHECKS = {"python": check_python, "bash": check_shell, "yaml": check_yaml, "toml": check_toml}
