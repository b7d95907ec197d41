"""A display whose words also go to the rank's log, so that nothing said on a terminal is lost with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal.observe.display import Display


class LoggedDisplay:
    """Passes everything to `display`, and what is said in words to `log` too."""

    def __init__(self, display: Display, log: logging.Logger) -> None:
        self._display, self._log = display, log

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        self._log.info("%s: steps %d to %d", title, first_step, total_steps)
        self._display.start(title, total_steps, first_step=first_step)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._display.step(step, values)

    def note(self, text: str) -> None:
        self._log.info("%s", text)
        self._display.note(text)

    def warn(self, text: str) -> None:
        self._log.warning("%s", text)
        self._display.warn(text)

    def finish(self) -> None:
        self._display.finish()
