"""One JSON object per line. Prompts and completions are not in it unless the operator wants them."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

LOGGER = "fathomlm.serve"


@dataclass(slots=True)
class LogEntry:
    """The fields of a request's log line besides HTTP; filled in by its handler."""

    model: str | None = None
    stream: bool | None = None
    choices: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: list[str] | None = None
    problem: str | None = None
    prompts: Any = None
    completions: list[str] | None = None

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class JsonLines(logging.Formatter):
    """`extra={"fields": {...}}` become keys of the line. A line break in a value is escaped, so a line is a record."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self._always = {} if replica is None else {"replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "event": record.getMessage()
        }  # fmt: skip
        line |= self._always | getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(replica: str | None = None) -> None:
    """Our lines and uvicorn's, in one form, each with the replica that wrote it where there are several. For the command
    line: a library leaves logging to its host."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines(replica))
    for name, level in ((LOGGER, logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log_event(event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    logging.getLogger(LOGGER).log(level, event, exc_info=error, extra={"fields": fields})
