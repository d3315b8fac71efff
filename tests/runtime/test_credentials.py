"""Credentials that are not handed to Ray: in variables, in the command, and in the files that are sent."""

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ltrscale.errors import InputError
from ltrscale.runtime import ray_internals
from ltrscale.runtime.credentials import refuse_credentials, refuse_files

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "jobs" / "configs").rglob("*.yaml"))
ALNUM, BASE64 = "[A-Za-z0-9]", "[A-Za-z0-9+/]"
FORMS = {
    "Amazon": "(AKIA|ASIA)[A-Z0-9]{16}",
    "Azure": rf"AccountName=shop;AccountKey=(?P<secret>{BASE64}{{86}}==);EndpointSuffix=core\.windows\.net",
    "Bearer": rf"Bearer (?P<secret>{ALNUM}{{20}}9)",
    "Databricks": "dapi[0-9a-f]{32}",
    "Discord": rf"https://discord\.com/api/webhooks/[0-9]{{18}}/{ALNUM}{{60}}",
    "GitHub": rf"gh[pousr]_{ALNUM}{{36}}",
    "GitHub, fine-grained": rf"github_pat_{ALNUM}{{22}}_{ALNUM}{{59}}",
    "GitLab": rf"glpat-{ALNUM}{{20}}",
    "Google": rf"AIza{ALNUM}{{35}}",
    "Hugging Face": rf"hf_{ALNUM}{{34}}",
    "JSON web token": rf"eyJ{ALNUM}{{20}}\.eyJ{ALNUM}{{30}}\.{ALNUM}{{43}}",
    "OpenAI": rf"sk-proj-{ALNUM}{{50}}A9",
    "PyPI": rf"pypi-{ALNUM}{{90}}",
    "SendGrid": rf"SG\.{ALNUM}{{22}}\.{ALNUM}{{43}}",
    "Slack": rf"xoxb-[0-9]{{12}}-{ALNUM}{{24}}",
    "Slack, webhook": rf"https://hooks\.slack\.com/services/T[A-Z0-9]{{8}}/B[A-Z0-9]{{8}}/{ALNUM}{{24}}",
    "Stripe": rf"(sk|rk)_live_{ALNUM}{{24}}",
    "Vault": rf"hvs\.{ALNUM}{{90}}",
    "data base": "host=db user=me password=(?P<secret>[a-z]{8}[0-9]) dbname=shop",
    "npm": rf"npm_{ALNUM}{{36}}",
    "URL": "postgresql://me:(?P<secret>[a-z]{8}[0-9])@db/shop",
    "URL, signed": rf"https://a\.blob\.core\.windows\.net/c\?sig=(?P<secret>{ALNUM}{{43}})",
}
KEY = "-----BEGIN OPENSSH PRIVATE" + " KEY-----\nb3Blbn\n"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_known_form_is_refused_and_not_repeated(form: str) -> None:
    @given(st.from_regex(form, fullmatch=True))
    def law(text: str) -> None:
        match = re.fullmatch(form, text)
        secret = match["secret"] if match and "secret" in match.groupdict() else text
        with pytest.raises(
            InputError, match=r"^environment\.PLAIN: looks like a credential, .* mount a secret"
        ) as error:
            refuse_credentials({"PLAIN": text}, ())
        assert secret not in str(error.value)
        with pytest.raises(InputError, match="credential") as error:
            refuse_credentials({}, ("finetune", "--set", f"note={text}"))
        assert secret not in str(error.value)

    law()


NAMES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "MY_API_TOKEN", "WANDB_API_KEY",
    "WANDB_APIKEY", "db_password", "DB_PASSWD", "DB_PWD", "MYSQL_PWD", "PGPASS", "PGPASSWORD", "DB_PASS", "COOKIE",
    "SESSION_COOKIE", "CLIENT_SECRET", "SSH_KEY", "SIGNING_PASSPHRASE", "AZURE_CREDENTIALS", "URL_SIGNATURE",
    "NPM_CONFIG__AUTH", "AUTHORIZATION",
)  # fmt: skip
OF_PLACES = (
    "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "BYPASS",
    "KEYBOARD", "NCCL_DEBUG",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_with_the_name_of_a_credential_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"^environment\.{name}: looks like"):
        refuse_credentials({name: "x"}, ())


@pytest.mark.parametrize("name", OF_PLACES)
def test_a_variable_that_only_sounds_like_one_is_sent(name: str) -> None:
    refuse_credentials({name: "/var/run/x"}, ())


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("storage.secret=hunter2", r"storage\.secret=\*\*\*: looks like"),
        ("--set=source.token=ab12cd", r"--set=source\.token=\*\*\*: looks like"),
        ("db={user: me, password: hunter2}", r"db=\{user: me, password: \*\*\*: looks like"),
        ('db={"api_key": "hunter2"}', r'db=\{"api_key": "\*\*\*: looks like'),
        ("note=AKIA" + "ABCDEFGHIJKLMNOP", r"note=\*\*\*: looks like"),
        ("note=AKIA" + "ABCDEFGHIJKLMNOP password=hunter2", r"note=\*\*\*: looks like"),
        ("out=s3://me:hunter2@bucket/x", r"out=s3://\*\*\*@bucket/x: has a credential in its URL"),
    ],
)
def test_a_credential_in_the_command_is_refused(word: str, shown: str) -> None:
    with pytest.raises(InputError, match=f"^{shown}") as error:
        refuse_credentials({}, ("finetune", *(["--set"] if not word.startswith("--") else []), word))
    assert "hunter2" not in str(error.value)


@given(st.binary(min_size=20, max_size=20), st.binary(min_size=30, max_size=30))
@example(bytes(range(20)), bytes(range(30)))
def test_hashes_and_places_are_no_credentials(commit: bytes, content: bytes) -> None:
    sha1, sha256 = commit.hex(), content.hex() + "0000"
    values = {"GIT_COMMIT": sha1, "GITHUB_SHA": sha1, "RUN_ID": sha256[:32], "IMAGE": f"shop@sha256:{sha256}"}
    place = f"s3://shop/runs/part-00000-{sha256}.parquet"
    refuse_credentials({**values, "PLACE": place}, ("score", "--set", f"data={place}", f"bundle=service/{sha256}/"))


def settings(value: object, key: str = "") -> Iterator[str]:
    """Each setting of a config in the form of the command line."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from settings(part, f"{key}.{name}" if key else str(name))
    yield f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()}"


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_no_setting_of_a_shipped_config_is_refused(path: Path) -> None:
    words = [word for text in yaml.safe_load_all(path.read_text()) for word in settings(text)]
    refuse_credentials({}, ("study", "--config", str(path), *words))
    refuse_credentials({f"V{i}": word.partition("=")[2] for i, word in enumerate(words)}, ())


def test_usual_words_are_no_credentials() -> None:
    usual = (
        "tokenizer=s3://shop/tokenizer.json", "pretrain.key=value", "joins=[{path: a.csv, key: sku}]", "group_key=sku",
        "in_context.sizes.token=64", "stream.tokens_per_batch=24000", "max_tokens=96", "storage.secret=null",
        "features=[price_per_unit_log1p_standardised_v2, click_through_rate_28d]", "slice=basic features of 2026",
        "sk-learn-pipeline-with-a-long-name", "npm_packages_by_popularity_of_2026",
    )  # fmt: skip
    refuse_credentials(
        {"PATH": "/opt/conda3/envs/Ranking/bin:/usr/bin", "AWS_ENDPOINT_URL": "http://10.0.0.7:9000"}, usual
    )


SECRET_FILES = (
    ".env", ".env.local", ".env.production", "shop.env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".git-credentials",
    ".pgpass", ".aws/credentials", "deploy/.aws/credentials", ".docker/config.json", ".kube/config", "kubeconfig",
    "kubeconfig.yaml", "id_rsa", ".ssh/id_ed25519", "store.p12", ".vault-token", ".databrickscfg", "secrets.yaml",
    "terraform.tfstate",
)  # fmt: skip
PUBLIC_FILES = (
    ".env.example", "id_rsa.pub", "config.json", "config", "tests.py", "environment.yaml", "tokens.json",
    "credentials.py",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in PUBLIC_FILES:
        (tmp_path / name).write_text("nothing\n")
    (tmp_path / "jobs").mkdir()
    return tmp_path


def write(folder: Path, name: str, text: str = "x=hunter2\n") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def check(folder: Path) -> None:
    refuse_files(folder, ray_internals.working_directory(folder))


@pytest.mark.parametrize("name", SECRET_FILES)
def test_a_file_of_credentials_is_named_and_its_remedy_works(folder: Path, name: str) -> None:
    check(folder)
    write(folder, name)
    with pytest.raises(InputError, match=rf"^working_dir: {re.escape(name)}: would be sent") as error:
        check(folder)
    (line,) = re.findall("`([^`]+)`", str(error.value))
    write(folder, ".rayignore", f"{line}\n")
    check(folder)


BASE64_KEY = base64.b64encode(KEY.encode()).decode()
CONTENTS = {
    "service-account.json": f'{{"type": "service_account", "private_key": "{KEY}"}}',
    "certs/server.pem": KEY,
    "server.key": KEY,
    "cluster.yaml": f"users: [{{user: {{client-key-data: {BASE64_KEY}}}}}]",
    "notes.txt": "use ghp_" + "a1B2" * 9,
    "jobs/shop.py": 'KEY = "AKIA' + 'ABCDEFGHIJKLMNOP"',
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_with_a_known_form_is_named(folder: Path, name: str) -> None:
    write(folder, name, CONTENTS[name])
    with pytest.raises(InputError, match=rf"^working_dir: {re.escape(name)}: would be sent"):
        check(folder)


def test_what_is_not_sent_is_not_looked_at(folder: Path) -> None:
    write(folder, ".gitignore", ".env\n")
    write(folder, ".rayignore", "/private/\n")
    write(folder, "private/id_rsa", KEY)
    write(folder, ".env")
    write(folder, "ca.pem", "-----BEGIN CERTIFICATE-----\n")
    check(folder)


def test_many_are_counted(folder: Path) -> None:
    for i in range(9):
        write(folder, f"{i}.env")
    with pytest.raises(InputError, match=r"0\.env, 1\.env, 2\.env, 3\.env, 4\.env and 4 more: would be sent"):
        check(folder)


@pytest.mark.slow
def test_this_checkout_is_sent(tmp_path: Path) -> None:
    """As a clone has it, whatever else lies in this one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    sent = ray_internals.working_directory(tmp_path)
    assert len(sent) > 300
    start = time.process_time()
    refuse_files(tmp_path, sent)
    assert time.process_time() - start < 3, "a tenth of that is usual"
