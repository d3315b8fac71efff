"""The jobs by name: each is a command of the module of that name, which is imported when it is asked for."""

import importlib
import sys

from jobs.cli import Command, show_reasons
from ltrscale.errors import InputError, suggestion

VERBS = {
    "from a log to a ranker": ("init", "prepare", "auto", "pipeline", "study", "weekly"),
    "data": ("simulate", "relabel", "clicks", "erase"),
    "models": ("pretrain", "finetune", "train_gbdt", "tune", "distill", "refit"),
    "is it better, and may it serve": ("evaluate", "report", "explain", "gate", "interleave", "verdict", "reconcile"),
    "serving and operating": ("predict", "score", "export", "submit", "doctor", "runs", "bench"),
}
"""The jobs by what they are for; each is a module of that name."""
NAMES = tuple(name for group in VERBS.values() for name in group)
GONE = {
    "config": "init lists the configs that come with the jobs, and prints one with --example",
    "contrast": "explain reports which features solve the contrast of a pretrained bundle; its `groups` are queries",
    "crossval": "pipeline has the key folds; write what was below `pipeline` beside it",
    "drift": "evaluate with evaluate.by_period=true judges each period, also evaluate of a pipeline or a gate",
    "match": "relabel has the step {kind: match, counted: PERIODS, ...}, whose other keys are those of match",
    "pretrain_in_context": "pretrain has the key in_context; write what was below `pretrain` there",
    "register": "export with --to mlflow registers a bundle, with registry.name and registry.store",
    "stack": "pipeline has methods of `kind: stack` with bundles and stack; its members are methods too",
}
"""Former jobs, with what does their work."""


def commands() -> list[Command]:
    """Every job, by name."""
    return [command(name) for name in sorted(NAMES)]


def command_or_end(name: str) -> Command:
    """The job with a name; if there is none, the process ends with one line that names the nearest, or the new one."""
    try:
        return command(name)
    except InputError as error:
        show_reasons(error)
        sys.exit(error.status)


def command(name: str) -> Command:
    """The job with a name; imports no other.

    Raises:
        InputError: there is no such job.

    Example:
        >>> command("pretrain").config.__name__
        'PretrainJob'
    """
    if name not in NAMES:
        instead = GONE.get(name) or suggestion(name, NAMES, "the jobs are")
        raise InputError(f"{name}: no such job; {instead}")
    module = importlib.import_module(f"jobs.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"jobs.{name}.__main__")
    found: Command = module.COMMAND
    return found
