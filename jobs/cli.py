"""The command line that all jobs share: a config from YAML, overrides, one function to call."""

import argparse
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, TracebackType
from typing import Any

from rich.text import Text

from jobs.help import KeyFacts, Table, committed, explained, fill, find, keys_of, notes, show, table_of, width
from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import ExpectedEnd, InputError, without_credentials
from ltrscale.progress import called, console, log
from ltrscale.signals import ending_on_signal

Job = tuple[type[Any], Callable[[Any], object]]
"""The class of a job's config, and the function that is called with one."""


def of_class(place: str) -> Callable[[], Job]:
    """The job of a class, `package.module:Class`, that has a method `run`; imported when it is called."""

    def job() -> Job:
        cls = resolve_name(place)
        return cls, cls.run

    return job


_AS_MODULE = "python -m jobs."
CONFIGS = Path(__file__).with_name("configs")
"""The configs that come with the jobs."""


@dataclass(frozen=True)
class Command:
    """A verb of the command line: `ltrscale NAME`, or `python -m jobs.NAME`, reads a config and calls a function."""

    name: str
    """The name of the job's module."""
    job: Callable[[], Job]
    """Imports the job from its package when it runs; `--help` reads a table instead, and imports none."""
    description: str
    """What the job does, with an example: the docstring of its module."""
    keys: str = ""
    """The keys that people set, separated by white space, for `--help`; empty for all."""
    flags: str = ""
    """The keys that have their own option, separated by white space."""
    package: str = "jobs"
    """Where the module of that name is."""
    argument: str = ""
    """The key whose value may stand alone, as the FILE of `jobs.init FILE`; empty for none. A list takes all words
    that stand alone, and after `--` every word does."""

    @property
    def config(self) -> type[Any]:
        """The class of the job's config."""
        return self.job()[0]

    def table(self) -> Table:
        """The keys of the job as plain data: those of the committed table, or of the config of any other command."""
        table = committed()
        return table if self.name in table.jobs else table_of({self.name: self.config})

    def help(self, asked: str) -> str:
        """The text of `--help`: the keys that people set, `all` keys, or one key and what is below it.

        Raises:
            InputError: there is no such key.
        """
        keys = list(keys_of(self.table(), self.name))
        if asked not in ("", "all"):
            return explained(find(keys, asked))
        by_name = {key.name: key for key in reversed(keys)}  # if several kinds share a name, the first one wins
        usual = keys if asked or not self.keys else [by_name[name] for name in self.keys.split()]
        options = parser(self)
        options.epilog = f"keys, with their defaults:\n{show(usual, width())}\n\n{fill(notes(usual, keys))}"
        return options.format_help()


def parser(command: Command) -> argparse.ArgumentParser:
    """The options of a verb."""
    table = command.table()
    fields = {field.name: field for field in table.configs[table.jobs[command.name]].fields}
    options = argparse.ArgumentParser(
        prog=called(command.name) if command.package == "jobs" else f"python -m {command.package}.{command.name}",
        description=fill(command.description.replace(_AS_MODULE, called(""))),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=width()),
        add_help=False,
    )
    options.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="KEY",
        help="show this help; with a key of the config, that key and all below it; with `all`, every key",
    )
    if command.argument:
        multiple = fields[command.argument].is_list
        options.add_argument(
            "argument",
            nargs="*" if multiple else "?",
            metavar=command.argument.upper(),
            help=f"short for --set {command.argument}=..." + ("; write -- before the first" if multiple else ""),
        )
    options.add_argument(
        "--config",
        metavar="YAML",
        action="append",
        type=shipped,
        default=[],
        help="the config: a path or a URL (s3://...); may be repeated, a later one overrides the earlier ones",
    )
    override = options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, for example --set out=runs/a"
    )
    keys = keys_of(table, command.name)
    override.completer = lambda **_: [f"{key.name}=" for key in keys if "=" not in key.name]  # type: ignore[attr-defined]
    options.add_argument("--print-config", action="store_true", help="print the resolved config and do nothing")
    _add_shortcuts(options, command, fields)
    if "out" in fields:
        options.add_argument(
            "--if-running",
            choices=["wait", "end"],
            help="if another job is writing the same output: wait for it (the default), or end and name it; "
            f"the environment variable {storage.WHEN_BUSY} has the same effect",
        )
    return options


def _add_shortcuts(options: argparse.ArgumentParser, command: Command, fields: Mapping[str, KeyFacts]) -> None:
    """Add the options of single keys, each short for `--set`."""
    for key in [*command.flags.split(), *(["workers"] if "workers" in fields else [])]:
        options.add_argument(
            f"--{key}",
            action="append",
            dest="set",
            type=partial("{}={}".format, key),
            metavar="VALUE",
            help=f"short for --set {key}=VALUE",
        )
    for name, field in fields.items():
        if field.default is False:
            switch = f"{name}=true"
            option = f"--{name.replace('_', '-')}"
            options.add_argument(
                option, action="append_const", dest="set", const=switch, help=f"short for --set {switch}"
            )


def main(command: Command) -> None:
    """Parse the command line and run the job; under torchrun rank 0 runs it and the others take part in its trainings.

    An `ExpectedEnd` is reported in a line, or in a line for each reason of a `Refused`, with its exit status; so is a
    full disk, with status 2.
    """
    options = parser(command).parse_args()
    sys.excepthook = _show_defect
    torchrun = _torchrun() if options.help is None else None
    if getattr(options, "if_running", None):
        os.environ[storage.WHEN_BUSY] = options.if_running  # Ray's processes inherit the environment
    try:
        if options.help is not None:
            print(command.help(options.help), end="")
            return
        with (
            _shown_log(torchrun.rank() if torchrun else 0),
            torchrun.taking_part() if torchrun else nullcontext(True) as is_first,
        ):
            if is_first:
                cls, run = command.job()
                config = configs.load(cls, options.config, _overrides(command, options))
                if options.print_config:
                    print(configs.dump(config), end="")
                    return
                for line in configs.to_check(options.config):
                    log.warning("not checked yet: %s", line)
                with ending_on_signal(), _full_disk_named():
                    run(config)
    except ExpectedEnd as error:
        if torchrun is None or torchrun.speaks():  # all processes fail together, one of them reports
            show_reasons(error)
        if torchrun:
            torchrun.leave()  # its agent kills the other processes as soon as one has ended
        sys.exit(error.status)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _torchrun() -> ModuleType | None:
    """The module that makes this process one of several of torchrun; None where it is alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from ltrscale.runtime import under_torchrun  # imports torch

    return under_torchrun if under_torchrun.is_running() else None


def show_reasons(error: ExpectedEnd) -> None:
    """Print why a job was not done, to standard error."""
    print(*(f"{error.word}: {line}" for line in str(error).split("\n")), sep="\n", file=sys.stderr)


def _overrides(command: Command, options: argparse.Namespace) -> list[str]:
    """All that the options set, as `key=value`."""
    if getattr(options, "argument", None) in (None, []):
        return list(options.set)
    return [*options.set, f"{command.argument}={json.dumps(options.argument)}"]


def read_command(command: Command, words: Sequence[str]) -> tuple[Config, list[str]]:
    """The config of a command line that another process will run, and the files that it names with `--config`.

    Raises:
        InputError: a file cannot be read, or a key or a value is wrong.
    """
    options = parser(command).parse_args(words)
    return configs.load(command.config, options.config, _overrides(command, options)), options.config


@contextmanager
def _full_disk_named() -> Iterator[None]:
    """Report a full disk in one line, also when a library that writes files itself, such as Ray Tune, runs into it."""
    try:
        yield
    except ExpectedEnd:
        raise
    except Exception as error:
        if not storage.is_disk_full(error):
            raise
        raise InputError(
            f"disk full ({str(error).strip().splitlines()[-1]}); make room on the disks of out and of "
            f"{tempfile.gettempdir()}, or set TMPDIR to another disk"
        ) from error


def _show_defect(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """Print a traceback as Python does, without credentials."""
    print(without_credentials("".join(traceback.format_exception(error))), end="", file=sys.stderr)


class _AboveBars(logging.Handler):
    """Prints lines above progress bars; the terminal folds long ones, so that a command in one is copied whole."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        console.print(Text(self.format(record)), soft_wrap=True)


@contextmanager
def _shown_log(rank: int) -> Iterator[None]:
    """Show the log on standard error: rank 0 shows everything and progress bars, other ranks show warnings only.

    Whoever calls a command in a process of their own, such as a notebook, has their log back once it has ended: its
    standard error may be closed by then.
    """
    level, quiet = log.level, console.quiet
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if rank == 0 and console.is_terminal:
        handler = _AboveBars()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    else:  # a file, or the log of a job on a cluster, where Ray adds no times
        console.quiet = rank > 0
        whose = f"rank {rank}: " if rank > 0 else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s {whose}%(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.WARNING if rank > 0 else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        console.quiet = quiet


def shipped(path: str) -> str:
    """The path of a config; of one that is named as in a checkout, and is not here, that of the installed copy."""
    inside = CONFIGS / path.removeprefix("jobs/configs/")
    return str(inside) if path.startswith("jobs/configs/") and not Path(path).exists() and inside.exists() else path
