"""Options and where their values come from (`settings`), and the sizes behind performance."""

from fastserial.config.settings import (
    MAX_BLOCK,
    TRANSFERS,
    Config,
    chosen,
    current,
    forget_installed,
    options,
    origin_of,
    parse_bool,
    parse_count,
    parse_size,
    set_installed,
    unknown_variables,
)

__all__ = [
    "MAX_BLOCK",
    "TRANSFERS",
    "Config",
    "chosen",
    "current",
    "forget_installed",
    "options",
    "origin_of",
    "parse_bool",
    "parse_count",
    "parse_size",
    "set_installed",
    "unknown_variables",
]
