"""The verdict of a live test: what a loop over rows finds, accounts that close, and what is refused by name."""

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from linear_teacher import linear_teacher
from pydantic import ValidationError
from weekly_log import Row, write_log

from jobs import cli
from jobs import verdict as command
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.verdict import LiveVerdict, VerdictJob, document
from ltrscale.reports.render import markdown

GOALS = {"orders": "orders", "rows": {}, "buyers": {"column": "orders", "any": True}}
RATE = {"clicks a session": {"column": "clicks", "per": "sessions"}, "clicks a row": {"column": "clicks", "per": "row"}}
DAYS = [f"2026-03-{day:02d}" for day in range(1, 15)]


def ab_rows(users: int = 600, *, lift: float = 0.8, seed: int = 0) -> pd.DataFrame:
    """One to five rows a user, over two weeks; the new arm has more clicks."""
    rng = np.random.default_rng(seed)
    user_N = np.repeat(np.arange(users), 1 + rng.integers(0, 5, users))
    arm_N = np.where(rng.permutation(users) < users / 2, "old", "new")[user_N]
    n, better_N = len(user_N), np.where(arm_N == "new", 1 + lift, 1.0)
    return pd.DataFrame(
        {
            "user": [f"u{user}" for user in user_N],
            "arm": arm_N,
            "day": [*DAYS, *rng.choice(DAYS, n - len(DAYS))],
            "sessions": rng.integers(1, 3, n),
            "clicks": rng.poisson(0.5 * better_N),
            "orders": rng.random(n).round(2) * (rng.random(n) < 0.2),
        }
    )


def interleaved_rows(users: int = 300, *, seed: int = 0) -> pd.DataFrame:
    """Lists of four items, whose first team is a coin's; the new one has more clicks."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(2 * users):
        first = number // 2 % 2
        for place, team in enumerate((first, 1 - first, first, 1 - first), 1):
            clicked = int(rng.random() < (0.3 + 0.2 * team) / place)
            rows.append((f"u{number % users}", f"i{number}", place, ("old", "new")[team], clicked))
    return pd.DataFrame(rows, columns=["user", "impression", "position", "arm", "clicks"])


def write(rows: pd.DataFrame, path: Path) -> str:
    """Write rows as the name of the file says."""
    match path.suffix:
        case ".csv":
            rows.to_csv(path, index=False)
        case ".jsonl":
            rows.to_json(path, orient="records", lines=True)
        case _:
            rows.to_parquet(path)
    return str(path)


def job(log: str | list[str], folder: Path, **more: Any) -> VerdictJob:
    """The job of an A/B test; `of_log` changes keys of its log."""
    about = {"kind": "ab", "inputs": log, "time": "day"} | more.pop("of_log", {})
    settings = {"arms": {"old": 1, "new": 1}, "control": "old", "goals": GOALS | RATE, "until": "2026-03-14"} | more
    return VerdictJob.model_validate({"out": str(folder / "out"), "log": about, **settings})


def interleaving(log: str, folder: Path, **more: Any) -> VerdictJob:
    about = {"kind": "interleaving", "inputs": log, "impression": "impression", "position": "position"}
    about |= more.pop("of_log", {})
    settings = {"arms": {"old": 1, "new": 1}, "control": "old", "goals": {"clicks": "clicks"}, "log": about} | more
    return VerdictJob.model_validate({"out": str(folder / "out"), **settings})


def found(of: VerdictJob) -> LiveVerdict:
    of.run(show=False)
    return LiveVerdict.read(of.out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_goals_are_those_of_a_loop_whatever_the_file(kind: str, tmp_path: Path) -> None:
    rows = ab_rows()
    halves = [write(rows[i::2], tmp_path / f"{i}.{kind}") for i in (0, 1)]
    verdict = found(job(halves, tmp_path))
    by_user = rows.groupby(["arm", "user"])[["orders", "clicks", "sessions"]].sum()
    by_user["rows"] = rows.groupby(["arm", "user"]).size()
    old, new = by_user.loc["old"], by_user.loc["new"]
    means = {
        "orders": lambda arm: arm["orders"].mean(),
        "rows": lambda arm: arm["rows"].mean(),
        "buyers": lambda arm: (arm["orders"] > 0).mean(),
        "clicks a session": lambda arm: arm["clicks"].sum() / arm["sessions"].sum(),
        "clicks a row": lambda arm: arm["clicks"].sum() / arm["rows"].sum(),
    }
    assert [goal.goal for goal in verdict.goals] == [*means]
    for goal in verdict.goals:
        mean = means[goal.goal]
        assert goal.base == pytest.approx(mean(old))
        assert goal.difference.mean == pytest.approx(mean(new) - mean(old))
        assert goal.lift.mean == pytest.approx(mean(new) / mean(old) - 1)
    assert verdict.users == {"old": len(old), "new": len(new)}
    assert "new against old: it raises clicks a session (+" in verdict.sentences[0]
    assert verdict.account.rows == verdict.account.used == len(rows)
    assert "Verdict: A/B test" in markdown(document(verdict))


@pytest.mark.slow
def test_a_second_run_does_nothing_and_new_rows_are_judged(tmp_path: Path) -> None:
    log = write(ab_rows(), tmp_path / "log.csv")
    assert job(log, tmp_path).run(show=False)
    assert not job(log, tmp_path).run(show=False)
    write(ab_rows(seed=1), tmp_path / "log.csv")
    assert job(log, tmp_path).run(show=False)


@pytest.mark.slow
def test_every_row_is_used_or_left_out_for_one_reason(tmp_path: Path) -> None:
    good = ab_rows()
    odd = good.iloc[:6].assign(orders=1.0).astype(object)
    for i, (column, value) in enumerate(
        {"user": None, "arm": "", "orders": "many", "day": "soon", "clicks": "inf"}.items()
    ):
        odd.iloc[i, odd.columns.get_loc(column)] = value
    odd.iloc[5, odd.columns.get_loc("arm")] = "third"
    early, late = (good.iloc[:3].assign(day=day) for day in ("2026-02-28", "2026-03-15"))
    empty = good.iloc[:2].assign(user=["x1", "x2"], clicks=np.nan)
    log = write(pd.concat([odd, early, good, late, empty]), tmp_path / "log.csv")
    with (tmp_path / "log.csv").open("a") as file:
        file.write("too,few\n")
    verdict = found(job(log, tmp_path, start="2026-03-01"))
    account = verdict.account
    assert account.left_out == {
        "no user": 1,
        "no arm": 1,
        "orders is no number": 1,
        "clicks is no number": 1,
        "of another arm": 1,
        "no time": 1,
        "before the start": 3,
        "after the end": 3,
        "unreadable": 1,
    }
    assert account.rows == account.used + sum(account.left_out.values()) == len(good) + 15
    assert sum(verdict.users.values()) == good["user"].nunique() + 2  # what is empty counts 0
    alone = found(job(write(pd.concat([good, empty]), tmp_path / "good.csv"), tmp_path, start="2026-03-01"))
    assert alone.goals == verdict.goals


@pytest.mark.slow
def test_a_sample_ratio_that_chance_does_not_give_is_refused(tmp_path: Path) -> None:
    rows = ab_rows(1000)
    lost = rows[(rows["arm"] == "old") | (rows["user"].str[-1] > "2")]
    of_job = job(write(lost, tmp_path / "log.csv"), tmp_path)
    users = lost.groupby("arm")["user"].nunique()
    counts = f"old has {users['old']} (planned 50.0%), new has {users['new']} (planned 50.0%)"
    for _ in range(2):  # also when it is up to date
        with pytest.raises(Refused, match="ratio: of the users, ") as refused:
            of_job.run(show=False)
        assert counts in str(refused.value)
    verdict = LiveVerdict.read(of_job.out)
    assert not verdict.goals
    assert "No verdict" in markdown(of_job.page())
    planned = {"old": float(users["old"]), "new": float(users["new"])}
    assert found(job(str(tmp_path / "log.csv"), tmp_path, arms=planned)).goals


def test_users_of_several_arms_are_refused_with_their_number(tmp_path: Path) -> None:
    rows = ab_rows()
    both = rows.drop_duplicates("user").iloc[:3]
    other = both.assign(arm=both["arm"].map({"old": "new", "new": "old"}))
    of_job = job(write(pd.concat([rows, other]), tmp_path / "log.csv"), tmp_path)
    with pytest.raises(Refused, match=r"overlap: 3 users have several arms, such as 'u"):
        of_job.run(show=False)


@pytest.mark.slow
def test_a_look_before_the_end_is_no_verdict(tmp_path: Path) -> None:
    rows = ab_rows()
    early = found(job(write(rows[rows["day"] < "2026-03-10"], tmp_path / "log.csv"), tmp_path))
    assert not early.goals
    assert early.sentences[0].startswith("No verdict yet: the log ends on 2026-03-09, and the test on 2026-03-14.")
    late = pd.concat([rows, rows.assign(day="2026-03-20", orders=9.0)])
    assert (
        found(job(write(late, tmp_path / "late.csv"), tmp_path)).goals
        == found(job(write(rows, tmp_path / "whole.csv"), tmp_path)).goals
    )


@pytest.mark.slow
def test_p_values_are_adjusted_for_all_goals_and_arms(tmp_path: Path) -> None:
    rows = ab_rows(900, lift=0.3)
    third = rows[rows["user"].str[-1].isin(["1", "2", "3"])].assign(arm="third")
    rows = pd.concat([rows[~rows["user"].isin(third["user"])], third])
    verdict = found(job(write(rows, tmp_path / "log.csv"), tmp_path, arms={"old": 7, "new": 7, "third": 6}))
    assert len(verdict.sentences) == 2
    p = np.array([goal.p for goal in verdict.goals])
    assert len(p) == 10
    assert verdict.goals[int(p.argmin())].p_holm == pytest.approx(10 * p.min())


@pytest.mark.slow
def test_interleaving_is_judged_by_user_and_negated_by_exchange(tmp_path: Path) -> None:
    rows = interleaved_rows()
    log = write(rows, tmp_path / "log.parquet")
    (there,), (back,) = (found(interleaving(log, tmp_path, control=arm)).goals for arm in ("old", "new"))
    credit = rows.pivot_table(values="clicks", index="user", columns="arm", aggfunc="sum")
    assert there.difference.mean == pytest.approx((credit["new"] - credit["old"]).mean())
    assert there.lift.mean == pytest.approx(2 * (credit["new"] - credit["old"]).sum() / credit.to_numpy().sum())
    assert there.sign == "raises"
    assert back.sign == "lowers"
    assert (back.lift.low, back.lift.high, back.p) == pytest.approx((-there.lift.high, -there.lift.low, there.p))


@pytest.mark.slow
def test_lists_that_begin_with_one_ranking_or_have_two_users_are_refused(tmp_path: Path) -> None:
    rows = interleaved_rows()
    swapped = rows.assign(arm=np.where(rows["position"] % 2, "new", "old"))
    with pytest.raises(Refused, match=r"ratio: of the lists by the arm of their first item, old has 0 .*new has 600"):
        interleaving(write(swapped, tmp_path / "one.csv"), tmp_path).run(show=False)
    shared = rows.assign(impression="i" + (rows.index // 8).astype(str))
    with pytest.raises(Refused, match=r"overlap: 300 lists have several users, such as 'i0'"):
        interleaving(write(shared, tmp_path / "shared.csv"), tmp_path).run(show=False)
    clicked = rows[rows["clicks"] > 0]
    with pytest.raises(InputError, match=r"lists begin at different positions; log.position needs a row for each"):
        interleaving(write(clicked, tmp_path / "clicked.csv"), tmp_path).run(show=False)
    alone = {"impression": None, "position": None}
    assert found(interleaving(str(tmp_path / "clicked.csv"), tmp_path, of_log=alone)).ratio is None


@pytest.mark.slow
def test_a_plan_gives_the_users_that_a_lift_takes(tmp_path: Path) -> None:
    past = ab_rows().drop(columns="arm")
    log = write(past, tmp_path / "past.csv")
    plan = found(job(log, tmp_path, plan=0.1, until=None, goals={"orders": "orders"}))
    orders = past.groupby("user")["orders"].sum()
    expected = (1.959964 + 0.841621) ** 2 * 4 * orders.var() / (0.1 * orders.mean()) ** 2
    (goal,) = plan.plan
    assert goal.needed == pytest.approx(expected, abs=1.01)
    assert f"takes {goal.needed:,} users" in plan.sentences[0]
    assert "this log has 600 in 14 days" in plan.sentences[0]
    uneven = found(job(log, tmp_path, plan=0.1, until=None, goals={"orders": "orders"}, arms={"old": 9, "new": 1}))
    assert uneven.plan[0].needed == pytest.approx(expected * (1 / 0.9 + 1 / 0.1) / 4, abs=1.01)
    of_lists = found(interleaving(write(interleaved_rows(), tmp_path / "lists.csv"), tmp_path, plan=0.1))
    assert of_lists.plan[0].needed


@pytest.mark.parametrize("users", [1, 5])
def test_a_plan_says_of_which_goals_the_log_knows_too_little(users: int, tmp_path: Path) -> None:
    """A goal that nobody has, and one of a single user, whose variance is unknown, take no number of users."""
    past = pd.DataFrame({"user": range(users), "day": DAYS[:users], "orders": range(1, users + 1), "returns": 0})
    goals = {"orders": "orders", "returns": "returns"}
    plan = found(job(write(past, tmp_path / "past.csv"), tmp_path, plan=0.1, until=None, goals=goals))
    unknown = "orders, returns" if users == 1 else "returns"
    assert [goal.goal for goal in plan.plan if goal.needed is None] == unknown.split(", ")
    assert f"does not say how many users {unknown} takes" in plan.sentences[-1]
    assert not any("takes 0 users" in sentence for sentence in plan.sentences)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An evaluation of a good ranker and a poor one, which is its baseline."""
    folder, rng = tmp_path_factory.mktemp("evaluated"), np.random.default_rng(0)
    rows = []
    for period in "abc":
        for _ in range(60):
            labels = (rng.random(8) < 0.3).astype(float)
            rows.append(Row(period, np.stack([labels + rng.normal(0, 0.5, 8), rng.normal(size=8)], 1).tolist(), labels))
    data = write_log(str(folder / "data"), rows, [Feature(name="x"), Feature(name="y")], row_group=60)
    weights = {"good": [1.0, 0.0], "poor": [0.0, 1.0]}
    models = {name: (linear_teacher(str(folder / name), data, of),) for name, of in weights.items()}
    splits = {
        name: Split(data=(data,), periods=(p,)) for name, p in zip(("train", "validation", "test"), "abc", strict=True)
    }
    config = EvaluateConfig.model_validate({"models": models, "splits": splits, "baseline": "poor"})
    EvaluateJob(out=str(folder / "report"), evaluate=config).run(show=False)
    return str(folder / "report")


@pytest.mark.slow
def test_the_report_says_whether_ndcg_foresaw_the_sign(evaluated: str, tmp_path: Path) -> None:
    log = write(ab_rows(), tmp_path / "log.csv")
    offline = {"evaluation": evaluated, "methods": {"old": "poor", "new": "good"}}
    verdict = found(job(log, tmp_path, offline=offline))
    assert "NDCG" in verdict.sentences[1]
    assert "foresaw the sign of clicks a session, clicks a row (goals with a sign: 2)" in verdict.sentences[1]
    down = found(job(write(ab_rows(lift=-0.8), tmp_path / "down.csv"), tmp_path, offline=offline))
    assert "foresaw the sign of none (goals with a sign: 2)" in down.sentences[1]
    for methods, said in ({"new": "good"}, "has no method 'old'"), ({"old": "good", "new": "poor"}, "baseline=good"):
        with pytest.raises(InputError, match=said):
            job(log, tmp_path, offline={"evaluation": evaluated, "methods": methods}).run(show=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": {"old": 1, "nwe": 1}}, r"log.csv: no row of the arm 'nwe' counts \(.*other arms are new\)"),
        ({"of_log": {"user": "usr"}}, r"log.csv: no column 'usr' \(id\); did you mean 'user'"),
        ({"goals": {"orders": "order"}}, r"log.csv: no column 'order' \(number\); did you mean 'orders'"),
        ({"goals": {"orders": "arm"}}, r"column 'arm' \(number\) should hold numbers and is string"),
        ({"start": "2027-01-01", "until": "2027-02-01"}, r"no row .*counts \(before the start: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    log = write(ab_rows(), tmp_path / "log.csv")
    with pytest.raises(InputError, match=said) as error:
        job(log, tmp_path, **change).run(show=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (job, {"until": None}, "until: name the last day"),
        (job, {"of_log": {"time": None}}, "log.time: start and until need"),
        (job, {"control": "odl"}, "control: 'odl' is no arm"),
        (job, {"goals": {"x": {"any": True, "per": "row"}}}, "any: counts users; leave per out"),
        (job, {"goals": {"x": "user"}}, "column: user is what goals are counted by"),
        (job, {"offline": {"evaluation": "e", "methods": {"nwe": "m"}}}, "'nwe' is no arm; the arms are old, new"),
        (interleaving, {"arms": {"old": 1, "new": 2}}, "equal shares; name two"),
        (interleaving, {"goals": {"x": {"any": True}}}, "goals.x: interleaving compares sums"),
        (interleaving, {"of_log": {"impression": None}}, "impression: position needs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    make: Callable[..., VerdictJob], change: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=said):
        make("log.csv", tmp_path, **change)


@pytest.mark.slow
def test_the_command_has_status_3_where_users_were_not_drawn_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(ab_rows().assign(arm="new"), tmp_path / "log.csv")
    with (tmp_path / "log.csv").open("a") as file:
        file.write(f"last,old,{datetime.date(2026, 3, 14)},1,1,1\n")
    words = [f"out={tmp_path / 'out'}", f"log={{kind: ab, inputs: {log}, time: day}}", "until=2026-03-14"]
    words += ["arms={old: 1, new: 1}", "control=old", "goals={orders: orders}"]
    monkeypatch.setattr("sys.argv", ["verdict", *(part for word in words for part in ("--set", word))])
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(command.COMMAND)
    said = capsys.readouterr()
    assert ended.value.code == 3
    assert "refused: ratio: of the users, old has 1 (planned 50.0%), new has 600 (planned 50.0%)" in said.err
    assert "No verdict" in said.out
