"""Whether calls of a compiled graph may be padded up to a budget."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fxsplit_encoder.capture.probe import probe_padding
from fxsplit_encoder.compile import Bindings, Program
from fxsplit_encoder.config import Padding

logger = logging.getLogger(__name__)


class PaddingPermission:
    """Decides once, and says so, whether a program is padded: where that is proved or declared; or, where the
    user asks for that, was seen to be harmless.
    """

    def __init__(self, program: Program, padding: Padding) -> None:
        self._program = program
        self._may_probe = padding == "probed"
        self._allowed = program.padding.allowed
        self.refusal: str | None = None
        """Why it is never padded; None: it is, or it was not decided yet."""

    def allows(self, bindings: Bindings, rows_to_probe: Callable[[], int | None]) -> bool:
        """Whether a call may be padded.

        Args:
            bindings: of the call.
            rows_to_probe: the rows that it would be padded to for a trial; None: there is no such size, and
                a later call is tried.
        """
        if self._allowed or self.refusal is not None:
            return self._allowed
        padding = self._program.padding
        if self._may_probe and padding.may_probe and not padding.refuted:
            rows = rows_to_probe()
            return rows is not None and self._probe(bindings, rows)
        self.refusal = str(padding)
        where = f" ({padding.source})" if padding.source else ""
        logger.warning(
            "a graph is never padded, so only calls that fill a budget or repeat a size are replayed: real "
            "rows may depend on pad rows at %s%s",
            self.refusal,
            where,
        )
        return False

    def _probe(self, bindings: Bindings, rows: int) -> bool:
        """Whether padding to so many rows changed no real row of this call."""
        self.refusal = probe_padding(self._program, bindings, rows)
        self._allowed = self.refusal is None
        padding = self._program.padding
        if self._allowed:
            logger.warning(
                "padding: probed: a graph is padded since that changed no row of one call (%d tokens to %d); "
                "other data may give wrong results: nothing is known of %s",
                self._program.tokens(bindings),
                rows,
                padding,
            )
        else:
            logger.warning("a graph is never padded (%s): %s", padding, self.refusal)
        return self._allowed
