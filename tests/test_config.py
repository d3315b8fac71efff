"""Configs: a dumped config is read back unchanged, and every error is one line that names the key."""

import contextlib
import importlib
import json
import pkgutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_configs import Circle, Job, Square, Strict, Tuned
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import ltrscale
from ltrscale import storage
from ltrscale.config import Config, check_keys, dump, load, validate
from ltrscale.errors import InputError
from ltrscale.ingest.baidu import BaiduUltr
from ltrscale.origin import digest, is_current, made_by

PIECES = [
    "a", ": ", "- ", "\n", "  ", "[", "]", "{", "}", ", ", "&x ", "*x", "<<: ", "!!binary ", "!!int ", "!!set ", "? ",
    "| ", "'", '"', "#", "%", "---", "1", "1:1", "0x", "1e999", ".nan", "2020-01-01", "~", "\t", "\0", "\ud800", "\x85",
    "kind", "circle", "radius",
]  # fmt: skip


jobs = st.builds(
    Job,
    name=st.text(),
    shape=st.builds(Circle, radius=st.floats(1e-300, 1e300)) | st.builds(Square, side=st.floats(-1e9, 1e9)),
    steps=st.lists(st.integers()).map(tuple),
    tags=st.dictionaries(st.text(), st.text()),
)


@given(jobs)
def test_dump_and_load_are_inverse(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    path.write_text(dump(job), encoding="utf-8")
    assert load(Job, str(path)) == job
    assert validate(Job, json.loads(job.model_dump_json()), "here") == job


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_number_survives_the_command_line(value: float) -> None:
    assert load(Job, overrides=["shape.kind=square", f"shape.side={value!r}"]).shape == Square(side=value)


def test_overrides_reach_into_mappings_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nshape:\nsteps: [1, 2]\nshapes: [{radius: 2}, {}]\n")
    overrides = ["shape.radius=1e-4", "steps.1=5", "shapes.1.radius=3", "tags.new=yes it is", "name=1e4"]
    job = load(Job, str(path), overrides)
    assert job.shape == Circle(radius=1e-4)
    assert job.steps == (1, 5)
    assert [circle.radius for circle in job.shapes] == [2, 3]
    assert job.tags == {"new": "yes it is"}
    assert job.name == "1e4"


class Either(Config):
    tags: str | dict[str, str] | None = None


def test_null_removes_an_entry_of_a_mapping_by_names(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ntags: {one: x, two: y}\n")
    assert load(Job, str(path), ["tags.one=null"]).tags == {"two": "y"}
    assert load(Job, str(path), ["tags.one=null", "tags.one=z"]).tags == {"one": "z", "two": "y"}
    assert load(Either, overrides=["tags={one: x, two: y}", "tags.one=null"]).tags == {"two": "y"}
    with pytest.raises(InputError, match=r"--set tags\.ones=null: no entry of that name to remove; did you mean 'one'"):
        load(Job, str(path), ["tags.ones=null"])
    with pytest.raises(InputError, match="name: Input should be a valid string"):  # no mapping: null is its value
        load(Job, str(path), ["name=null"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["job.steps=[1]"], Tuned(job=Tuned().job.replace(steps=(1,)))),
        (["job.shape.radius=2"], Tuned(job=Tuned().job.replace(shape={"kind": "circle", "radius": 2}))),
        (["job.shape.kind=circle"], Tuned()),
        (["job.shape.kind=square"], Tuned(job=Tuned().job.replace(shape={"kind": "square"}))),
        (["job.tags={b: '2'}"], Tuned(job=Tuned().job.replace(tags={"b": "2"}))),
        (["shape.kind=circle"], Tuned(shape=Circle())),
        (["shape.side=1"], Tuned(shape=Square(side=1))),
    ],
)
def test_setting_one_key_leaves_the_others_as_they_were(overrides: list[str], expected: Tuned) -> None:
    assert load(Tuned, overrides=overrides) == expected


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(Job, str(tmp_path / "empty.yaml")) == Job()


@pytest.mark.parametrize(
    ("cls", "overrides", "message"),
    [
        (Job, ["nmae=x"], "command line: nmae: unknown key; did you mean 'name'?"),
        (Job, ["shape.radios=1"], "command line: shape.radios: unknown key; did you mean 'shape.radius'?"),
        (
            Job,
            ["shape={kind: square, radius: 1}"],
            "shape.radius: a key of kind circle, and shape.kind is square; change one of the two",
        ),
        (Job, ["zzz=1"], "command line: zzz: unknown key; the keys here are name, shape, shapes, steps, tags"),
        (
            Strict,
            ["out=x", "job.shape.kind=square", "job.shape.sied=1"],
            "job.shape.sied: unknown key; did you mean 'job.shape.side'?",
        ),
        (Job, ["shape.radius=-1"], "shape.radius: Input should be greater than 0 (given -1)"),
        (Job, ["shape.radius=.inf"], "shape.radius: Input should be a finite number"),
        (Job, ["steps.0=1"], "--set steps.0=1"),
        (Job, ["steps=[1, 2]", "steps.2=3"], "--set steps.2=3: '2' is not an index of a list of 2; count from 0"),
        (Job, ["name={a: 1, a: 2}"], "--set name={a: 1, a: 2}: not YAML: line 1, column 8: 'a' stands here twice"),
        (Job, ["name.deep=1", "name.deep.er=1"], "--set name.deep.er=1: 'er' is below a plain value"),
        (Job, ["name"], "--set name: write it as key=value"),
        (Job, ["=1"], "--set =1: write it as key=value"),
        (Job, ["name=[1"], "--set name=[1: not YAML: line 1, column 3"),
        (Strict, [], "command line: out: missing, and has no default; set it"),
        (
            BaiduUltr,
            ["max_query=64"],
            "command line: max_query: no longer a key, because its value is fixed at 32; remove it",
        ),
    ],
)
def test_what_is_wrong_is_one_line(cls: type[Config], overrides: list[str], message: str) -> None:
    values = ["steps=3", *overrides] if message == "--set steps.0=1" else overrides
    with pytest.raises(InputError) as error:
        load(cls, overrides=values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "not YAML: line 1, column 5"),
        (b"shape:\n  radius: 1\n  radius: 2\n", "not YAML: line 3, column 3: 'radius' stands here twice"),
        ("name: caf\u00e9".encode("latin-1"), "not text in UTF-8"),
        (b"name: a\x00", "not YAML"),
        (b"&a [*a]", "not YAML"),
        (b"- 1", "a config is a mapping of keys to values, this is a list"),
        (b"\xff\xfe\x00", "job.yaml"),
        (b"name: 3", "name: Input should be a valid string (given 3)"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load(Job, str(path))
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    with pytest.raises(InputError, match="no such file"):
        load(Job, str(tmp_path / "other.yaml"))


def test_configs_are_frozen_and_replace_validates() -> None:
    circle = Circle()
    with pytest.raises(ValidationError, match="frozen"):
        circle.radius = 2.0  # type: ignore[misc]
    assert circle.replace(radius=2) == Circle(radius=2)
    assert Job(shape=Square()).replace(name="x").shape == Square()
    with pytest.raises(ValidationError, match="greater than 0"):
        circle.replace(radius=0)


def test_an_error_says_that_overrides_took_part(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\n")
    with pytest.raises(InputError, match=r"job\.yaml with --set: steps: Input should be a valid tuple"):
        load(Job, str(path), ["steps=3"])


def test_a_mapping_may_override_what_it_merges(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("tags: {a: &a {<<: &b {x: 1, y: 1}, y: 2}, b: {<<: *a, x: 3}}\n")
    with pytest.raises(InputError, match=r"tags\.a: Input should be a valid string"):  # it is YAML, though not a Job
        load(Job, str(path))


@given(jobs, jobs)
def test_digests_distinguish_configs(a: Job, b: Job) -> None:
    assert (digest(a) == digest(b)) == (a.model_dump_json() == b.model_dump_json())
    values = a.model_dump(mode="json")
    assert digest(dict(reversed(values.items()))) == digest(a)


def test_a_directory_is_current_for_the_same_origin_only(tmp_path: Path) -> None:
    origin = made_by("stage", Job(steps=(1, 2)), {"data": "hash"})
    assert not is_current(str(tmp_path), origin)
    with storage.Commit(str(tmp_path)) as commit:
        commit.finish({"made_by": origin})
    assert is_current(str(tmp_path), origin)
    for other in (
        made_by("other", Job(steps=(1, 2)), {"data": "hash"}),
        made_by("stage", Job(steps=(2, 1)), {"data": "hash"}),
        made_by("stage", Job(steps=(1, 2)), {"data": "changed"}),
    ):
        assert not is_current(str(tmp_path), other)


def test_an_override_changes_one_use_of_a_yaml_alias(tmp_path: Path) -> None:
    class Inner(Config):
        x: int = 0

    class Outer(Config):
        a: Inner
        b: Inner

    path = tmp_path / "shared.yaml"
    path.write_text("a: &inner {x: 1}\nb: *inner\n")
    loaded = load(Outer, str(path), ["b.x=2"])
    assert (loaded.a.x, loaded.b.x) == (1, 2)


def aliases(levels: int, form: str) -> str:
    """A few hundred bytes that expand to 10 ** levels values."""
    lines = [f"tags: &a0 {{{', '.join(f'k{i}: x' for i in range(10))}}}"]
    lines += [form.format(i=i, before=i - 1) for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "form",
    [
        "t{i}: &a{i} [" + ", ".join(["*a{before}"] * 10) + "]",
        "t{i}: &a{i} {{<<: [" + ", ".join(["*a{before}"] * 10) + "]}}",
        "t{i}: &a{i} {{" + ", ".join(f"k{j}: *a{{before}}" for j in range(10)) + "}}",
    ],
)
def test_a_small_text_that_aliases_make_huge_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(aliases(9, form))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"bomb\.yaml: not YAML: line .* too large or too deep for a config"):
            load(Job, str(path))
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tags: &a [*a]", "an alias inside its own value"),
        ("tags: &a {k: {k: *a}}", "an alias inside its own value"),
        ("tags: " + "[" * 60 + "]" * 60, "too large or too deep"),
        ("tags: " + "[" * 100_000, "maximum recursion depth"),
        ("tags: &a " + "x" * 100_000 + "\nsteps: [" + "*a, " * 50 + "]", "too large or too deep"),
        ("steps: [" + "9" * 5000 + "]", "line 1, column 9: no int .*digits"),
        ("steps: !!bool x", "line 1, column 8: no bool"),
        ("steps: 2020-13-45", "month"),
        ("name: " + "x" * (1 << 19), "more than 524,288 bytes"),
    ],
)
def test_a_text_that_no_config_is_made_of_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"job\.yaml: .*{reason}"):
        load(Job, str(path))


def test_an_alias_in_a_config_of_usual_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("shape: &a {kind: circle, radius: 2}\nshapes: [" + "*a, " * 1000 + "]")
    assert len(load(Job, str(path)).shapes) == 1000


@settings(derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_config_or_one_line(text: str) -> None:
    with contextlib.suppress(InputError):
        load(Job, overrides=[f"name={text}", f"tags={text}", f"shape={text}", f"steps={text}"])


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/job.yaml", "https://example.org/job.yaml", "simplecache::http://127.0.0.1:1/job.yaml",
        "zip://job.yaml::/etc/x.zip", "github://a:b@c/job.yaml", "data:text/plain,name: x", "ftp://127.0.0.1/x",
        "memory://job.yaml", "s3://bucket/a::http://127.0.0.1:1/x", "reference://x", "S3://bucket/x",
    ],
)  # fmt: skip
def test_a_config_is_read_from_stores_of_files_only(url: str) -> None:
    with pytest.raises(InputError, match="not a path or URL that is read; use a local path, or one of s3://, gs://"):
        load(Job, url)


def subclasses(cls: type[Config]) -> Iterator[type[Config]]:
    for each in cls.__subclasses__():
        yield from (each, *subclasses(each))


def test_a_record_with_a_fixed_key_is_read_only_with_its_value() -> None:
    for module in pkgutil.walk_packages(ltrscale.__path__, "ltrscale."):
        importlib.import_module(module.name)
    with_fixed = [cls for cls in subclasses(Config) if cls.fixed]
    assert {"PrepareConfig", "TrainingConfig", "FinetuneConfig"} <= {cls.__name__ for cls in with_fixed}
    for cls in with_fixed:
        assert all(base.fixed.items() <= cls.fixed.items() for base in cls.__mro__ if issubclass(base, Config))
        assert not cls.fixed.keys() & cls.model_fields.keys()
        for key, value in cls.fixed.items():
            check_keys(cls, {key: value}, "earlier")
            with pytest.raises(InputError, match=rf"earlier: {key}: no longer a key"):
                check_keys(cls, {key: [value]}, "earlier")
