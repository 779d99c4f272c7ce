"""Shows the answer to one request, the same way from one process and from a cluster."""

from __future__ import annotations

from pd_ops.output import Document, Output
from pd_ops.results import interrupted_document, summary_line


class AnswerView:
    """One request's choices as they come.

    JSON: with `streams` an event a step, and one `complete` a choice; else one document, which of several choices is
    {"choices": [...]}. For people: one choice as it comes (`streams`) or at its end; of several, each at its end.
    """

    def __init__(self, output: Output, *, streams: bool, num_choices: int) -> None:
        self._output = output
        self._streams = streams
        self._single = num_choices == 1
        self._events: list[list[Document]] = [[] for _ in range(num_choices)]
        self._results: list[Document | None] = [None] * num_choices

    def step(self, choice: int, event: Document) -> None:
        """`event` is a `results.tokens_event`."""
        self._events[choice].append(event)
        if self._streams:
            self._output.document(self._numbered(choice, event))
            if self._single:
                self._output.text(event["text"], end="")

    def end(self, choice: int, document: Document) -> None:
        """`document`: the choice's result."""
        self._results[choice] = document
        if self._streams:
            self._output.document({"event": "complete", **self._numbered(choice, document)})
        self._output.text("" if self._streams and self._single else document["text"])
        summary = summary_line(document)
        self._output.note(summary if self._single else f"[choice {choice}] {summary}")

    def close(self) -> None:
        """All choices have ended."""
        if not self._streams:
            self._output.document(self._whole([document for document in self._results if document is not None]))

    def interrupt(self) -> None:
        """Nothing more comes."""
        come = [
            interrupted_document(events) if result is None else result
            for events, result in zip(self._events, self._results, strict=True)
        ]
        document = come[0] if self._single else {"interrupted": True, **self._whole(come)}
        self._output.document({"event": "interrupted", **document} if self._streams else document)
        for result, shown in zip(self._results, come, strict=True):
            if result is None:
                self._output.text("" if self._streams and self._single else shown["text"])
        self._output.note("[interrupted]")

    def _whole(self, documents: list[Document]) -> Document:
        if self._single:
            return documents[0]
        return {"choices": [self._numbered(choice, document) for choice, document in enumerate(documents)]}

    def _numbered(self, choice: int, document: Document) -> Document:
        return document if self._single else {"choice": choice, **document}
