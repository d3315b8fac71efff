"""The outputs of every stage as hashes, to compare before and after a change of the code:

    python tests/golden.py DIRECTORY                         run, and write DIRECTORY/golden.json
    python tests/golden.py DIRECTORY --against golden.json   the same, and name what differs from another run

The commands are those of `golden.sh`, small trainings one after the other in DIRECTORY/run: the demo and what goes on
from it, MQ2008, a sample of the news log, texts and simulated clicks of NFCorpus, and two workers under Ray. Recorded
of each committed directory are its origin (settings and inputs) and the hashes of its files, but for reports that
people read. Every command computes with one thread; figures of another machine may differ in their last digits.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import ROOT, link_data, short

CLOCK = r"seconds|minutes|_per_s(econd)?$"
FOR_PEOPLE = (".md", ".html", ".svg", ".png")
PRELUDE = """
job() { # words with a = are settings
    local name=$1; shift; local words=(); local word
    for word in "$@"; do case $word in *=*) words+=(--set "$word");; *) words+=("$word");; esac; done
    "$PYTHON" -m "jobs.$name" "${words[@]}" >log.txt 2>&1 || [ $? = 3 ] || { tail -n 30 log.txt >&2; return 1; }
}
"""
"""A gate that stays shut, with status 3, has done its work."""


def chains() -> dict[str, list[str]]:
    """The lines of `golden.sh` by chain."""
    parts = re.split(r"^#: (\w+)\n", Path(__file__).with_name("golden.sh").read_text(), flags=re.MULTILINE)
    return {name: text.splitlines() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def run(home: Path, lines: list[str]) -> Iterator[str]:
    """Run the commands of a chain, and say how long each takes; yields those that fail."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    set_before = "\n".join(line for line in lines if not line.startswith("job "))
    for line in lines:
        if line.startswith("job "):
            start = time.monotonic()
            script = f"{PRELUDE}\n{set_before}\n{line}"
            failed = subprocess.run(["bash", "-c", script], cwd=home, env=environment).returncode
            sys.stdout.write(f"{time.monotonic() - start:6.1f} s  {line[:110]}\n")
            sys.stdout.flush()
            if failed:
                yield line


def set_up(home: Path) -> None:
    """Shortened configs, and the data beside the directory."""
    (home / "configs").mkdir(parents=True)
    for config in (ROOT / "jobs" / "configs").rglob("*.yaml"):
        (home / "configs" / config.name).write_text(short(config.read_text()))
    link_data(home.parent / "shared" / "data", ROOT.parent / "shared" / "data")


def outputs(home: Path) -> dict[str, Any]:
    """The origin and the files of each directory that is committed below `home`.

    Of inputs their places count, because their contents are outputs themselves or given. Names of Parquet files lose
    the part that is another one in each run.
    """
    found = {}
    for path in sorted(home.rglob("*manifest.json")):
        manifest = json.loads(path.read_text())
        origin = timeless(manifest.get("made_by") or {})
        origin["inputs"] = sorted(origin.get("inputs", {}))
        names = [file["path"] for file in manifest.get("files", []) if not file["path"].endswith(FOR_PEOPLE)]
        files = {re.sub(r"(-[0-9a-f]{8})+(?=\.\w+$)", "", name): content(path.parent / name) for name in names}
        place = str(path.parent.relative_to(home))
        found[place] = json.loads(json.dumps({"made_by": origin, "files": files}).replace(str(home), "HOME"))
    return found


def content(path: Path) -> str:
    """A hash of a file; of JSON without what a clock measured."""
    data = path.read_bytes()
    if path.suffix == ".json":
        data = json.dumps(timeless(json.loads(data)), sort_keys=True).encode()
    elif path.suffix == ".txt":  # LightGBM's text names the ports of its workers
        data = re.sub(rb"^\[(local_listen_port|machines): .*\n", b"", data, flags=re.MULTILINE)
    return hashlib.sha256(data).hexdigest()


def timeless(value: Any) -> Any:
    """Plain data without times."""
    match value:
        case dict():
            return {key: timeless(inner) for key, inner in value.items() if not re.search(CLOCK, key)}
        case list():
            return [timeless(inner) for inner in value]
    return value


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What differs between two records, a line for each place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}: {key}" if place else key)
    elif before != after:
        yield f"{place}: {str(before)[:300]} -> {str(after)[:300]}"


def main() -> None:
    """Run the chains, and record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="must not exist yet")
    parser.add_argument("--against", type=Path, help="golden.json of another run")
    parser.add_argument("--chains", nargs="+", default=[*chains()], choices=[*chains()])
    arguments = parser.parse_args()
    home = arguments.directory.resolve() / "run"
    set_up(home)
    failed = [line for chain in arguments.chains for line in run(home, chains()[chain])]
    made = outputs(home)
    (home.parent / "golden.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{len(made)} outputs are in {home.parent / 'golden.json'}\n")
    before = json.loads(arguments.against.read_text()) if arguments.against else made
    found = [*(f"failed: {line}" for line in failed), *differences(before, made)]
    sys.exit("\n".join([*found, f"{len(found)} differences"]) if found else 0)


if __name__ == "__main__":
    main()
