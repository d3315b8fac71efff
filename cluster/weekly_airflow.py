"""A week that comes every week, as a DAG of Airflow 3: put this file into its folder of DAGs.

The task is the command itself, on a worker with the installation and the configs in /srv/shop. Weeks come in their
order, one at a time; a week that Airflow missed is caught up on, since each run names its own. Status 3, a refusal,
shows as skipped and is not tried again; what was cut off is, and goes on.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

with DAG(
    dag_id="ltrscale_weekly",
    schedule=CronDataIntervalTimetable("10 6 * * MON", timezone="UTC"),  # a run's interval begins with its week
    start_date=datetime(2026, 11, 30, tzinfo=UTC),
    catchup=True,
    max_active_runs=1,
):
    BashOperator(
        task_id="weekly",
        cwd="/srv/shop",
        bash_command=(
            ".venv/bin/python -m jobs.weekly --config shop/weekly.yaml "
            "--inputs 's3://my-bucket/log/{{ data_interval_start.strftime(\"%G-W%V\") }}/*.parquet'"
        ),
        skip_on_exit_code=3,
        retries=2,
        retry_delay=timedelta(minutes=10),
        execution_timeout=timedelta(hours=12),
    )
