"""The code blocks of the README and the docs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Each training is made short, in configs and in commands, and all else is as printed.
AT_MOST: dict[str, float] = {
    "budget": 0.5,
    "epochs": 2,
    "head_epochs": 1,
    "num_trees": 20,
    "trials": 3,
    "candidates": 3,
    "runs": 2,
    "draws": 2,
    "groups_per_week": 150,
    "resamples": 200,
    "max_tokens": 24,
}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    every = [Block(page, text[: m.start(2)].count("\n") + 1, m[1], m[2]) for m in found]
    return [block for block in every if block.language in languages]


def configs(page: Path) -> dict[str, str]:
    """The YAML blocks of a page that are files, by the names in their first lines."""
    named = ((re.match(r"# (\w+\.yaml)\b", block.text), block.text) for block in blocks(page, "yaml"))
    return {name[1]: text for name, text in named if name}


def lines(text: str) -> Iterator[str]:
    """The commands of a shell block, with continued lines joined and without comments alone."""
    for line in text.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            yield line


def commands(page: Path) -> Iterator[list[str]]:
    """The words of the commands of a page; after a submission, those of its job."""
    for line in (line for block in blocks(page, "sh") for line in lines(block.text)):
        words = shlex.split(line, comments=True)
        if words[0] == "ltrscale":
            words = ["python", "-m", f"jobs.{words[1]}", *words[2:]]
        yield words
        if words[2:3] == ["jobs.submit"] and "--" in words:
            job, *arguments = words[words.index("--") + 1 :]
            yield ["python", "-m", f"jobs.{job}", *arguments]


def short(text: str) -> str:
    """The text with no setting above `AT_MOST`, and of several seeds or numbers of labelled groups the first two."""

    def less(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{min(int(found[3]), AT_MOST[found[1]])}"

    text = re.sub(r"\b((?:seeds|labelled): \[\d+, \d+), [^]]*\]", r"\1]", text)
    return re.sub(rf"\b({'|'.join(AT_MOST)})(=|: ?)(\d+)\b", less, text)


def link_data(beside: Path, shared_data: Path) -> None:
    """The data sets as they are, but of NFCorpus the best candidates of some queries."""
    corpus = beside / "text" / "nfcorpus"
    corpus.mkdir(parents=True)
    (beside / "text" / "vocab").symlink_to(shared_data / "text" / "vocab")
    for name in ("letor", "csv", "news"):
        (beside / name).symlink_to(shared_data / name)
    for file in (shared_data / "text" / "nfcorpus").iterdir():
        if file.name != "bm25.tsv.gz":
            (corpus / file.name).symlink_to(file)
    candidates = pd.read_csv(shared_data / "text" / "nfcorpus" / "bm25.tsv.gz", sep="\t")
    few = candidates[candidates["qid"].isin(candidates["qid"].unique()[::8]) & (candidates["rank"] <= 12)]
    few.to_csv(corpus / "bm25.tsv.gz", sep="\t", index=False)
