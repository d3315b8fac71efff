"""Methods that read features, not only the scores of other methods."""

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from ltrscale.config import overlay
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits, Texts
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.training.presets import Preset


class ReadingMethod(AnyMethod):
    """A method that reads features, not only the scores of other methods."""

    preset: Preset | None = None
    """Start from published settings of the whole method, which its own settings override: `paper` as HOU24's text has
    them, `hou24` as its public code does."""
    leave_out: Texts = ()
    """Features that this method does not read: names, prefixes with * such as c_*, or `categorical` for all of that
    kind. So one report can compare a method with and without them."""
    learns_from: str | None = None
    """Learn the labels of this entry of the pipeline's `learn_from`, such as clicks; empty for those of `splits`."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, values: Any) -> Any:
        """The method's settings override those of its preset."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values  # no preset, or an unknown one, which the validation of the field refuses
        named = {"kind": cls.model_fields["kind"].default, **values}
        return overlay(cls.of_preset(values["preset"], values), named)

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a preset for this kind; some depend on those that are given, as in a config."""
        return {}

    @classmethod
    def with_preset(cls, preset: Preset, given: Mapping[str, Any], methods: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings with this preset, where they name none."""
        return {"preset": preset, **given}

    @property
    def labels_from(self) -> str | None:
        """The entry of `learn_from` whose labels it learns."""
        return self.learns_from

    def check_features(self, splits: Splits) -> None:
        """Check that the features that it leaves out exist."""
        if self.leave_out:
            select(splits.leaving_out(self.leave_out).train, labelled=True)

    def splits_in(self, run: SeedRun) -> Splits:
        """The splits that it learns from, without the features that it leaves out."""
        splits = run.splits if self.learns_from is None else run.learn_from[self.learns_from]
        return splits.leaving_out(self.leave_out)
