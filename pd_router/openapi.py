"""What the HTTP door says of itself at /openapi.json: bodies with their ranges, and the answers that there can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_engine.sampling.params import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SPECULATE,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
)
from pd_router.openai_body import Strict
from pd_router.openai_reply import Json
from pd_router.request import MAX_MESSAGES, MAX_REQUEST_ID_CHARS, MAX_SALT_CHARS, MAX_TARGET_MS, MAX_USER_CHARS

Responses = dict[int | str, dict[str, Any]]

_TEXT = {"type": "string", "minLength": 1}
_PENALTY = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}

# Checked when the request is prepared, with messages of its own; here for who reads the schema.
RANGES: dict[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 1 / MAX_REPETITION, "maximum": MAX_REPETITION},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "seed": {"minimum": 0, "exclusiveMaximum": 2**64},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "stop": {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS, "maxItems": MAX_STOP_STRINGS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "speculate": {"minimum": 0, "maximum": MAX_SPECULATE},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "user": {"maxLength": MAX_USER_CHARS},
    "request_id": {"maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[!-~]*$"},
    "cache_salt": {"maxLength": MAX_SALT_CHARS},
    "ttft_target_ms": {"minimum": 1, "maximum": MAX_TARGET_MS},
    "itl_target_ms": {"minimum": 1, "maximum": MAX_TARGET_MS},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES},
}
LISTS_OF_IDS = ("tokens", "stop_token_ids")
_KEYWORDS = {  # that a type knows
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "integer": ("minimum", "maximum", "exclusiveMaximum"),
    "string": ("minLength", "maxLength", "pattern"), "array": ("minItems", "maxItems"),
}

ERROR = {
    "type": "object", "required": ["error"],
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": "null"},
                "code": {"type": "string", "description": "as in gRPC, lower case"},
            },
        },
    },
}
_REASONS = {
    400: "The request is wrong; the message says what and what is allowed.",
    401: "An API key is needed, or this one is unknown.",
    404: "The model is not served here.",
    405: "Another method is for this path; Allow says which.",
    409: "The request_id stands for another request.",
    429: "Too many requests, or targets that cannot be kept; Retry-After says in how many seconds to come again.",
    500: "A fault of the server.",
    503: "No worker can serve it now, or the router stops.",
    504: "It has not ended in time.",
}
_OF_REQUESTS = (400, 404, 409, 429, 500, 503, 504)


def body_schema(body: type[Strict], vocab_size: int) -> Json:
    """With nothing that lies elsewhere."""
    schema = body.model_json_schema()
    properties = _inlined(schema["properties"], schema.pop("$defs", {}))
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    for name in LISTS_OF_IDS:
        for branch in _branches(properties.get(name, {})):
            if branch.get("type") == "array":
                branch["items"] = token_id
    for name, ranges in RANGES.items():
        for branch in _branches(properties.get(name, {})):
            known = _KEYWORDS.get(branch.get("type", ""), ())
            branch.update({word: value for word, value in ranges.items() if word in known})
    if not {"type", "anyOf"} & properties.get("prompt", {"type": ""}).keys():
        ids = {"type": "array", "items": token_id, "minItems": 1}
        several = {"type": "array", "items": {"anyOf": [_TEXT, ids]}, "minItems": 1, "maxItems": MAX_CHOICES}
        properties["prompt"]["anyOf"] = [_TEXT, ids, several]
    return {**schema, "properties": properties}


def _inlined(part: Any, definitions: Json) -> Any:
    """References of a schema that is not a document of its own lead nowhere."""
    if isinstance(part, list):
        return [_inlined(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in part.items()}


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    branches: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return branches


def request_body(body: type[Strict], vocab_size: int) -> Json:
    schema = body_schema(body, vocab_size)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def path_parameter(name: str) -> Json:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def answers(*media_types: str, status_codes: tuple[int, ...] = (), needs_key: bool = True) -> Responses:
    """200 in these media types, and errors of that status."""
    found: Responses = {200: {"description": "Done.", "content": {media: {} for media in media_types}}}
    for status in sorted({*status_codes, 405, *((401,) if needs_key else ())}):
        found[status] = {
            "description": _REASONS[status], "content": {"application/json": {"schema": ERROR}},
        }
    return found


def answers_of_requests(*media_types: str) -> Responses:
    return answers(*media_types, status_codes=_OF_REQUESTS)
