"""The plug-in's lines in vLLM's log; each names fusednorm's version."""

import logging

from fusednorm.version import __version__

# A child of vLLM's own logger, so vLLM's log shows its messages.
_logger = logging.getLogger("vllm.fusednorm")


def say(words: str) -> None:
    """Logs what the plug-in does."""
    _logger.info("fusednorm %s: %s", __version__, words)


def warn(words: str) -> None:
    """Logs what a user may not expect."""
    _logger.warning("fusednorm %s: %s", __version__, words)


def warn_left(words: str) -> None:
    """Logs what of vLLM stays as it was, and why."""
    _logger.warning("fusednorm %s leaves %s", __version__, words)
