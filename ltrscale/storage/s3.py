"""An s3fs whose requests all wait for a store that cannot be reached or refuses for now."""

import asyncio
import contextlib
import io
import re
from http.client import IncompleteRead
from typing import Any

from aiohttp import ClientPayloadError
from botocore.exceptions import FlexibleChecksumError  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from ltrscale.storage.faults import is_unexplained
from ltrscale.storage.patience import Tries

_CUT_SHORT = (ClientPayloadError, ResponseParserError, IncompleteRead, FlexibleChecksumError)
_ALWAYS = {"list_objects_v2": "IsTruncated", "create_multipart_upload": "UploadId"}
"""What each answer to these requests has: without a body it would count as an empty listing."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class PatientS3(S3FileSystem):  # type: ignore[misc]
    """S3 that tries each request again, the content of its answer included, as `patience` decides."""

    retries = 1  # none by s3fs itself: its requests do not share the clock of an outage

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        tries = Tries()
        while True:
            try:
                answer = await self._call_once(method, *arguments, **options)
            except Exception as error:
                pause = tries.pause_after(error)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                tries.answered()
                return answer

    call_s3 = sync_wrapper(_call_s3)

    async def _call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """One request with its whole answer, so that a connection lost in the middle fails here and is tried again."""
        try:
            answer = await super()._call_s3(method, *arguments, **options)
            if method == "get_object":
                with contextlib.closing(answer["Body"]) as body:
                    data = await body.read()
                _check_length(options.get("Range", ""), answer.get("ContentRange", ""), len(data))
                answer["Body"] = _Content(data)
            if method in _ALWAYS and _ALWAYS[method] not in answer:
                raise ConnectionError("the answer was cut short: it has no content")
        except _CUT_SHORT as error:
            raise ConnectionError(f"the answer was cut short ({' '.join(str(error).split())})") from error
        except OSError as error:
            if method == "head_object" and is_unexplained(error):
                # the answer to HEAD has no body for a reason: GET is refused alike, and its answer names the reason
                key = {name: options[name] for name in ("Bucket", "Key", "VersionId") if name in options}
                await self._call_once("get_object", Range="bytes=0-0", **key)
            raise
        return answer


def _check_length(asked: str, answered: str, bytes_: int) -> None:
    """Check that a part of a file came whole: s3fs takes what comes, and fills a gap with zeros.

    botocore compares a whole file with its checksum, which no store sends for a part.

    Args:
        asked: the header Range of the request, or "".
        answered: the header Content-Range of the answer, or "".
        bytes_: of the answer's body.

    Raises:
        ConnectionError: it is shorter or longer than what was asked for.
    """
    if (part := _RANGE.fullmatch(asked)) is None:
        return
    first, last, total = *part.groups(), answered.rpartition("/")[2]
    ends = [int(last) + 1] * bool(last) + [int(total)] * total.isdecimal()
    if bytes_ != min(ends, default=0) - int(first):
        raise ConnectionError(f"the answer was cut short: {bytes_:,} bytes came for {asked} of {answered or 'no part'}")


class _Content:
    """The content of an answer in the form that s3fs reads."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    async def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()
