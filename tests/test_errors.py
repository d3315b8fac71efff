"""How work ends early: the classes, their lines, and the way of an error to another process."""

import pickle
import subprocess
import sys

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError
from torch.distributed import HashStore

from ltrscale.errors import ExpectedEnd, InputError, Refused, Stopped, UnavailableError
from ltrscale.runtime.engine import plain_errors
from ltrscale.runtime.under_torchrun import World, _ending_together

ENDS = {
    "input": InputError("a file\n\nis damaged", "s3://me:key@bucket"),
    "outage": UnavailableError("s3://me:key@bucket/a: no answer\n in time"),
    "refused": Refused("one\n reason", "and another"),
    "stopped": Stopped("after step 3", status=130),
}


def test_the_lines_have_no_line_ends_and_no_credentials() -> None:
    assert {name: str(error) for name, error in ENDS.items()} == {
        "input": "a file is damaged\ns3://***@bucket",
        "outage": "s3://***@bucket/a: no answer in time",
        "refused": "one reason\nand another",
        "stopped": "after step 3",
    }


@pytest.mark.parametrize("error", ENDS.values(), ids=ENDS)
def test_an_error_is_the_same_in_another_process(error: ExpectedEnd) -> None:
    for module in (pickle, cloudpickle):
        arrived = module.loads(module.dumps(error))
        assert (type(arrived), str(arrived), arrived.status) == (type(error), str(error), error.status)


def test_an_outage_is_no_input_error() -> None:
    assert not issubclass(UnavailableError, InputError)


@pytest.mark.parametrize("kind", [InputError, UnavailableError])
def test_an_error_of_a_task_of_ray_keeps_its_class(kind: type[ExpectedEnd]) -> None:
    of_task = RayTaskError("task", "a traceback", kind("bucket: no answer")).as_instanceof_cause()
    with pytest.raises(kind, match=r"^bucket: no answer$") as caught, plain_errors("its process"):
        raise of_task
    assert type(caught.value) is kind


@pytest.mark.parametrize("error", ENDS.values(), ids=ENDS)
def test_all_processes_of_torchrun_end_with_the_first_error(error: ExpectedEnd) -> None:
    store = HashStore()
    store.set("failure", "")
    first, other = (World(rank, store, None, iter(())) for rank in (0, 1))  # type: ignore[arg-type]
    with pytest.raises(type(error)), _ending_together(first):
        raise error
    with pytest.raises(type(error)) as caught, _ending_together(other):
        raise RuntimeError("connection closed by peer")
    assert (str(caught.value), caught.value.status) == (str(error), error.status)


ENDED = """
from jobs.cli import Command, main
from ltrscale.config import Config
from ltrscale.errors import {kind}
def run(_):
    raise {kind}("s3://me:key@bucket/a: what\\n happened")
main(Command("job", lambda: (Config, run), "A job."))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "line", "status"),
    [
        ("InputError", "error", 2),
        ("UnavailableError", "error", 2),
        ("Refused", "refused", 3),
        ("Stopped", "stopped", 143),
    ],
)
def test_a_job_ends_with_one_line_and_the_status(kind: str, line: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED.format(kind=kind)], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == (f"{line}: s3://***@bucket/a: what happened\n", status)
