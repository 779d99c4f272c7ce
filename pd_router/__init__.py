"""The router: takes requests, places them on a prefill and a decode worker, and streams their tokens out.

A request's way: `grpc_door` or `http_door` (what arrives) -> `request` (checked, tokenized) -> `admission` ->
`dispatch` (one `runner` a journey) -> `placement` over the `registry`'s snapshot -> `link` (calls to a worker) ->
`journey` and `stream` (each token once, in order, as text) -> back out through the door. Nothing here imports torch.
"""
