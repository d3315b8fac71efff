"""`ltrscale VERB`, the same as `python -m jobs.VERB`; alone it lists the verbs."""

import argparse
import os
import sys
import textwrap

from jobs.cli import main, parser
from jobs.help import width
from jobs.verbs import NAMES, VERBS, command, command_or_end, commands


def verbs() -> str:
    """The verbs with what they do."""
    does = {each.name: each.description.strip().partition("\n\n")[0] for each in commands()}
    margin = 2 + max(map(len, does)) + 2
    lines = ["usage: ltrscale VERB [options]", "", "`ltrscale VERB --help` explains a verb and its keys."]
    for title, names in VERBS.items():
        lines += ["", title]
        for name in names:
            text = f"  {name}".ljust(margin) + " ".join(does[name].split())
            lines += textwrap.wrap(text, width(), subsequent_indent=" " * margin, break_on_hyphens=False)
    return "\n".join(lines)


def complete() -> None:
    """Answer the shell that asks what may come next: verbs, or the options and keys of a verb."""
    import argcomplete  # for shells only
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    if words[1:] and words[1] in NAMES:
        os.environ["_ARGCOMPLETE"] = "2"  # the verb takes the place of the program's name
        argcomplete.autocomplete(parser(command(words[1])))
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("verb", choices=NAMES)
    argcomplete.autocomplete(every)


def ltrscale() -> None:
    """Run the verb that the command line names first."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    verb = (sys.argv[1:] or ["--help"])[0]
    if verb in ("-h", "--help", "help"):
        print(verbs())
        return
    found = command_or_end(verb)
    sys.argv[:2] = [f"{sys.argv[0]} {verb}"]  # what is recorded of the run names the verb
    main(found)


if __name__ == "__main__":
    ltrscale()
