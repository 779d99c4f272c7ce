"""What the router itself spends on the first and the last of the seven stages.

Always on: two looks at the clock a prompt, two a token and two a reply. Sockets and waiting are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pd_engine.service.stage_names import Stage
from pd_engine.text.output import TextDelta
from pd_router.stream import Text


class OwnStages(Collector):
    """Attributes:
    tokenize_s: of all prompts, with the chat template.
    streaming_s: of all choices: text of tokens, stop strings, replies made.
    """

    def __init__(self) -> None:
        self.tokenize_s = 0.0
        self.streaming_s = 0.0

    def seconds(self) -> dict[str, float]:
        """By stage."""
        return {Stage.TOKENIZE.value: self.tokenize_s, Stage.STREAMING.value: self.streaming_s}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "pdrelay_router_stage_seconds", "Of the router itself, by stage.", labels=["stage"]
        )
        for stage, seconds in self.seconds().items():
            family.add_metric([stage], seconds)
        yield family


class Streaming:
    """Seconds that one choice has taken; they are the router's, too."""

    def __init__(self, own: OwnStages) -> None:
        self.seconds = 0.0
        self._own = own

    def note(self, seconds: float) -> None:
        self.seconds += seconds
        self._own.streaming_s += seconds


class TimedText:
    """A choice's text, whose making is timed."""

    def __init__(self, text: Text, streaming: Streaming) -> None:
        self._text = text
        self._streaming = streaming

    def push(self, token_id: int) -> TextDelta:
        begun_s = time.perf_counter()
        delta = self._text.push(token_id)
        self._streaming.note(time.perf_counter() - begun_s)
        return delta

    def finish(self) -> str:
        return self._text.finish()
