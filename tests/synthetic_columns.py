"""A synthetic log for tests, and its columns as a config of `jobs.prepare` names them."""

from pathlib import Path

from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig

COLUMN_MAPPING = {
    "query": "query_id",
    "item": "item_id",
    "label": "label",
    "time": "event_time",
    "features": ["f_*"],
    "categorical": ["c_*"],
}


def write_synthetic(config: SyntheticLogConfig, out: Path | str) -> list[str]:
    """Make the log; returns its files, week by week."""
    SyntheticLog(out=str(out), log=config).run()
    return sorted(map(str, Path(out).glob("week=*/*.parquet")))
