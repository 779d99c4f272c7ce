"""Carries one request to the controller on this host, for somebody who reaches the host by a shell only.

    python -m pd_ops.cluster.control_bridge CLUSTER REQUEST      REQUEST as in `control_messages`; prints the reply
"""

from __future__ import annotations

import asyncio
import json
import sys

from pd_engine.errors import PdRelayError
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import parse_request


def main() -> None:
    cluster, request = sys.argv[1:]
    try:
        reply = {"result": asyncio.run(ask_controller(cluster, parse_request(request.encode())))}
    except PdRelayError as error:
        reply = {"error": {"code": error.code.value, "message": error.message}}
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
