"""The choices of one request on their way in: none is refused once one of them has begun. Pure."""

from __future__ import annotations

from pd_engine.errors import PdRelayError


class ChoiceGroup:
    """Attributes:
    has_begun: one was let in: the others are not refused any more, they wait as long as it takes.
    error: why one was refused before that, and with it all of them; None otherwise.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.error: PdRelayError | None = None

    def begin(self) -> None:
        assert self.error is None, self.error
        self.has_begun = True

    def refuse(self, error: PdRelayError) -> None:
        """The first refusal is the request's; nothing where one has begun."""
        if not self.has_begun and self.error is None:
            self.error = error
