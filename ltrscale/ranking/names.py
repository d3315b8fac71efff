"""Names of metrics: a kind, such as `mrr`, with keys of its own and a cut-off, as in `rbp(persistence=0.9)@10`."""

import re
from typing import NamedTuple, Self

_FORM = re.compile(r"(?P<kind>\w+)(\((?P<keys>\w+=[^=,()@\s]+(, ?\w+=[^=,()@\s]+)*)\))?(@(?P<k>[1-9]\d*))?")


class Name(NamedTuple):
    """The parts of a metric's name; as text it is the name.

    Example:
        >>> Name.parsed("rbp(persistence=0.9)@10")
        Name(kind='rbp', keys=(('persistence', '0.9'),), k=10)
        >>> str(Name.parsed("ndcg@5")), str(Name("rbp", (("persistence", "0.9"),)))
        ('ndcg@5', 'rbp(persistence=0.9)')
    """

    kind: str
    keys: tuple[tuple[str, str], ...] = ()
    """Keys of the metric's own that differ from their defaults, with their values."""
    k: int | None = None
    """The cut-off."""

    @classmethod
    def parsed(cls, text: str) -> Self:
        """The parts of a name.

        Raises:
            ValueError: the text has not the form of a name, or states a key twice.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} has not the form kind(key=value)@k")
        keys = [key.strip().partition("=") for key in (found["keys"] or "").split(",") if key]
        if len({key for key, _, _ in keys}) < len(keys):
            raise ValueError(f"{text!r} states a key twice")
        cutoff = None if found["k"] is None else int(found["k"])
        return cls(found["kind"], tuple((key, value) for key, _, value in keys), cutoff)

    def __str__(self) -> str:
        """The name."""
        keys = f"({','.join(f'{key}={value}' for key, value in self.keys)})" if self.keys else ""
        return self.kind + keys + (f"@{self.k}" if self.k is not None else "")

    def uncut(self) -> "Name":
        """The name without its cut-off."""
        return self._replace(k=None)
