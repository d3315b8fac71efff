"""The union of sources: what `prepare` reads."""

from typing import Annotated

from pydantic import Field

from ltrscale.ingest.baidu import BaiduUltr
from ltrscale.ingest.grouplogs import GroupRows
from ltrscale.ingest.items import Items
from ltrscale.ingest.letor import Letor

SourceConfig = Annotated[Letor | Items | GroupRows | BaiduUltr, Field(discriminator="kind")]
