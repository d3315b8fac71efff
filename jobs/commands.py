"""The jobs by their names."""

import importlib
import pkgutil

import jobs
from jobs.cli import Command
from ltrscale.errors import InputError, suggestion


def commands() -> list[Command]:
    """Every job, by name."""
    return sorted(filter(None, map(_of_module, _modules())), key=lambda command: command.name)


def command(name: str) -> Command:
    """The job with a name; imports no other.

    Raises:
        InputError: there is no such job.

    Example:
        >>> command("pretrain").config.__name__
        'PretrainJob'
    """
    job = _of_module(name) if name in _modules() else None
    if job is None:
        names = [each.name for each in commands()]
        raise InputError(f"{name}: no such job; {suggestion(name, names, 'the jobs are')}")
    return job


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(jobs.__path__)]


def _of_module(name: str) -> Command | None:
    """The job of a module or package; None if it is none, as this one."""
    module = importlib.import_module(f"jobs.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"jobs.{name}.__main__")
    return getattr(module, "COMMAND", None)
