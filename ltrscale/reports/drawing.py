"""Pictures of charts, drawn in a separate process: if it fails or crashes, only a chart is lost.

The drawing library aborts when memory or address space is short, and has done so at a control character.
"""

import base64
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ltrscale.reports.charts import VEGA_LITE_VERSION, WIDTH, Spec, theme

_PROGRAM = "from ltrscale.reports.drawing import draw_lines; draw_lines()"
_WAIT_S = 120.0
"""Time limit for the pictures of a document; each takes about 0.1 s."""

_OWN_NAMES = (
    *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable"),
    *("toLocaleString", "toString", "valueOf", "__proto__"),
    *("__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__"),
)
"""Properties of every JavaScript object (ECMA-262, 20.1.3 and B.2.2). Vega's look-ups of texts find these."""


def drawable(value: Any) -> Any:
    """A specification without what pictures or browsers cannot read.

    Control characters become visible, and numbers that are not finite become null. A text in `_OWN_NAMES` gets an
    invisible trailing space.
    """
    match value:
        case str():
            text = value if value.isprintable() else "".join(map(_visible, value))
            return f"{text} " if text in _OWN_NAMES else text
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {drawable(key): drawable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [drawable(inner) for inner in value]
    return value


def _visible(character: str) -> str:
    """The symbol for a control character; `U+FFFD` for others that XML or JavaScript does not allow in text."""
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if 0xD800 <= code < 0xE000 or code in (0x2028, 0x2029, 0xFFFE, 0xFFFF) else character


def draw(specs: Sequence[Spec]) -> list[bytes | str]:
    """The picture of each chart as PNG on white, or a line that says why there is none."""
    drawn: list[bytes | str] = []
    while len(drawn) < len(specs):
        found, end = _draw(specs[len(drawn) :])
        drawn += found
        if len(drawn) < len(specs):
            drawn.append(end)  # for the chart at which the process ended; the next process continues after it
    return drawn


def _draw(specs: Sequence[Spec]) -> tuple[list[bytes | str], str]:
    """The pictures from one process, in order, and how it ended."""
    lines = b"".join(_asked(spec) + b"\n" for spec in specs)
    found_here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # own session: Ctrl-C must reach only the job, which stops between its steps
            [sys.executable, "-c", _PROGRAM],
            input=lines,
            capture_output=True,
            timeout=_WAIT_S,
            env=found_here,
            start_new_session=True,
            check=False,
        )
        output, end = done.stdout, f"drawing ended with status {done.returncode}: {_first_words(done.stderr)}"
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"drawing took more than {_WAIT_S:.0f} s"
    except OSError as error:
        output, end = b"", f"drawing did not start: {error}"
    return [_answer(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")], end


def _asked(spec: Spec) -> bytes:
    try:
        return json.dumps(spec).encode()
    except (TypeError, ValueError) as error:
        return json.dumps(f"no plain data: {error}").encode()


def _answer(line: bytes) -> bytes | str:
    answer = json.loads(line)
    return base64.b64decode(answer["png"]) if "png" in answer else str(answer["error"])


def _first_words(text: bytes) -> str:
    """The first meaningful line of a crash."""
    lines = (line.strip("# ") for line in text.decode(errors="replace").splitlines())
    return next((line[:200] for line in lines if line), "no word")


def draw_lines() -> None:
    """Draw the charts from standard input, one JSON per line, and answer with a line for each."""
    for line in sys.stdin.buffer:
        try:
            answer = {"png": base64.b64encode(_png(json.loads(line))).decode()}
        except Exception as error:  # any error costs only this chart
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _png(spec: Spec | str) -> bytes:
    import vl_convert

    if isinstance(spec, str):
        raise TypeError(spec)
    fixed = {**spec, "width": WIDTH} if spec.get("width") == "container" else spec
    config = {**theme(dark=False), "background": "white", "font": "DejaVu Sans, sans-serif"}
    picture: bytes = vl_convert.vegalite_to_png(fixed, vl_version=VEGA_LITE_VERSION, scale=1.5, config=config)
    return picture
