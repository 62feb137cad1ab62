"""Structured logs: one event a line, JSON off a terminal, on standard error."""

import logging
import os
import sys

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(service: str) -> None:
    """Set up structlog for this process. GSPO_LOG_LEVEL is debug, info (default), warning or error.

    Raises: ValueError for another level.
    """
    level = os.environ.get("GSPO_LOG_LEVEL", "info").lower()
    if level not in LEVELS:
        raise ValueError(f"GSPO_LOG_LEVEL is {level!r}: use one of {', '.join(LEVELS)}")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
