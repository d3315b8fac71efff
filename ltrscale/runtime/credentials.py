"""Finds credentials, by their names and forms, that must not reach Ray: its dashboard, logs and client show them.

Well-known names and forms are found. A password that looks like a word, under a name that says nothing, is not: see
docs/operating.md for what is promised.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import translate
from pathlib import Path

from ltrscale.errors import InputError, without_credentials

_REMEDY = (
    "everybody who sees the dashboard can read it; give the nodes a role or an instance profile, or mount a secret "
    "into them (cluster/kuberay-rayjob.yaml, envFrom)"
)
_VARIABLE = re.compile(
    r"(?:^|_)(?:[A-Z]*(?:TOKEN|SECRETS?|PASSWO?R?DS?|PASSPHRASE|PWD|CREDENTIALS?|COOKIES?|SIGNATURE|APIKEYS?)"
    r"|(?:ACCESS|SECRET|PRIVATE|ACCOUNT)?KEYS?|(?:PG|DB|[A-Z]*SQL)?PASS|SIG|AUTHORIZATION)(?:_|$)|_AUTH$",
    re.IGNORECASE,
)
"""Words in the names of variables that hold credentials."""
_HARMLESS = re.compile(r"^(?:OLD)?PWD$|^GOOGLE_APPLICATION_CREDENTIALS$|_(?:FILE|PATH|DIR)$", re.IGNORECASE)
"""Variables with such words that hold a path: a shell directory, or a file on the node."""
_OF_CONTENT = re.compile(
    r"(?:^|_)(?:SHA\d*|HASH|DIGEST|CHECKSUM|MD5|COMMIT|REV|REVISION|VERSION|ID)(?:_|$)", re.IGNORECASE
)
"""Words in the names of variables that hold a hash or id, which looks like a key."""
_RANDOM = re.compile(
    r"[0-9a-f]{32,}"
    r"|(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)(?:[A-Za-z0-9+=]{32,}|[A-Za-z0-9+][A-Za-z0-9+/]{39})"
)
"""Values of variables that look random."""
_FORMS = {
    "-----BEGIN": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "LS0tLS1CRUdJTiB": r"LS0tLS1CRUdJTiB(?!DRVJU|QUVJM)[\w+/]{16}",  # in base64, except public certificates
    "AKIA ASIA": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # Amazon
    "ghp_ gho_ ghu_ ghs_ ghr_": r"\bgh[pousr]_[A-Za-z0-9]{30,}",
    "github_pat_": r"\bgithub_pat_\w{40,}",
    "glpat- gldt- glrt- glcbt- glptt- glft- glsoat-": r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{20,}",
    "hf_ npm_": r"\b(?:hf|npm)_[A-Za-z0-9]{30,}",
    "pypi-": r"\bpypi-[\w-]{50,}",
    "_live_ _test_": r"\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    "sk-": r"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32,}",  # OpenAI and Anthropic
    "hvs. hvb. hvr.": r"\bhv[sbr]\.[\w-]{20,}",  # Vault
    "xox xapp-": r"\bxox[a-z]-[\w-]{10,}|\bxapp-[\w-]{20,}",  # Slack
    "hooks.slack.com/": r"hooks\.slack\.com/(?:services|workflows)/\w",
    "/api/webhooks/": r"discord(?:app)?\.com/api/webhooks/\d",
    "AIza ya29.": r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}",  # Google
    "SG.": r"\bSG\.[\w-]{20,}\.[\w-]{40,}",  # SendGrid
    "dapi": r"\bdapi[0-9a-f]{32}\b",  # Databricks
    "dop_v1_": r"\bdop_v1_[0-9a-f]{64}",  # DigitalOcean
    "eyJ": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.",  # a JSON web token
}
"""Private keys and tokens of well-known services, by literal text in them: a search for that is fast."""
_SETTING = re.compile(
    r"(?:(?<![a-z])(?:[a-z]*(?:passwo?r?d|passphrase|secret)|pwd|sharedaccesskey|credentials?|cookie"
    r"|(?:account|api|access|secret|private|signing|storage)[_-]?key(?:[_-]?id)?)[\"']?\s*[=:]\s*[\"']?"
    r"|(?<![a-z])[a-z]*token[\"']?\s*[=:]\s*[\"']?(?=[^\s\"',;&}]*[a-z])"  # a plain `token` may be a number
    r"|\b(?:bearer|basic)\s+(?=\S*[\d=])(?=\S{8}))"
    r"(?=[^\s\"',;&}])(?!(?:null|none|true|false)\b|\*\*\*)",
    re.IGNORECASE,
)
"""What precedes a credential in a text: `password=`, `AccountKey=`, `token: `, `Bearer `."""
_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass",
    ".my.cnf", ".htpasswd", ".dockercfg", ".docker/config.json", ".aws/credentials", ".s3cfg", ".boto", ".vault-token",
    ".databrickscfg", ".kube/config", "kubeconfig", "kubeconfig.*", "*.kubeconfig", "*.tfstate", "id_rsa", "id_dsa",
    "id_ecdsa", "id_ed25519", "id_*_sk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk",
    "secrets.yaml", "secrets.yml", "secrets.toml", "secrets.json",
    "application_default_credentials.json", "client_secret*.json", "kaggle.json",
)  # fmt: skip
"""Files to refuse by the end of their path, because their content has no known form; others are searched."""
_FILE_NAME = re.compile("|".join(map(translate, _FILES)))
_EXAMPLES = (".example", ".sample", ".template", ".dist")
_LARGEST = 1 << 20  # bytes of a file to search: keys are small


def refuse_credentials(environment: Mapping[str, str], command: Sequence[str]) -> None:
    """Refuse variables and a command that seem to hold a credential.

    Raises:
        InputError: one does; the message does not repeat it.
    """
    for name, value in environment.items():
        named = _VARIABLE.search(name) and not _HARMLESS.search(name)
        random = _RANDOM.fullmatch(value) and not _OF_CONTENT.search(name)
        if named or random or _found(value) is not None or without_credentials(value) != value:
            raise InputError(f"environment.{name}: looks like a credential, and {_REMEDY}")
    for word in command:
        if (start := _found(word)) is not None:
            raise InputError(f"{word[:start]}***: looks like a credential, and {_REMEDY}")
        if without_credentials(word) != word:
            raise InputError(f"{word}: has a credential in its URL, and {_REMEDY}")


def refuse_files(folder: Path, sent: Collection[str], copy: Path | None = None) -> None:
    """Refuse to send files of a folder that store credentials or contain one of a well-known form; `copy` has them too.

    Raises:
        InputError: there are such files; the message names them.
    """
    found = [name for name in sorted(sent) if _is_secret((copy or folder) / name, name)]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        lines = ", ".join(f"`/{name}`" for name in found[:5])
        raise InputError(
            f"working_dir: {', '.join(found[:5])}{more}: would be sent, and looks like credentials: everybody who sees "
            f"the dashboard can fetch it; add a line to {folder / '.rayignore'} for each, such as {lines}"
        )


def _is_secret(path: Path, name: str) -> bool:
    bytes_, parts = path.stat().st_size, name.lower().split("/")[-2:]
    if bytes_ == 0 or parts[-1].endswith(_EXAMPLES):
        return False
    if _FILE_NAME.match(parts[-1]) or _FILE_NAME.match("/".join(parts)):
        return True
    return bytes_ <= _LARGEST and _token(path.read_bytes().decode("latin-1")) is not None


def _token(text: str) -> int | None:
    """Start of a private key or token of a known form in a text; None without one."""
    likely = (form for hints, form in _FORMS.items() if any(hint in text for hint in hints.split()))
    return min((match.start() for form in likely if (match := re.search(form, text))), default=None)


def _found(text: str) -> int | None:
    """Start of a credential in a text, outside URLs; None without one."""
    setting = _SETTING.search(text)
    starts = (_token(text), setting.end() if setting else None)
    return min((start for start in starts if start is not None), default=None)
