"""What a process does whose peer is gone."""

from __future__ import annotations

import select
import socket
import sys

from processes import TIMEOUT_S, Started

LOSES_ITS_PEER = """
import socket, sys
from app.errors import let_the_first_be_seen
ports = [int(port) for port in sys.argv[1:]]
peer, store = (socket.create_connection(("127.0.0.1", port)) for port in ports)
let_the_first_be_seen(RuntimeError("Connection closed by peer"), store_port=ports[1])
"""


def test_who_lost_a_peer_hangs_up_on_the_others_at_once_and_speaks_later():
    """But not on the store."""
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("127.0.0.1", 0)) as store:
        ports = [str(server.getsockname()[1]) for server in (peer, store)]
        started = Started([sys.executable, "-c", LOSES_ITS_PEER, *ports])
        (from_peer, _), (from_store, _) = peer.accept(), store.accept()
        with from_peer, from_store:
            from_peer.settimeout(TIMEOUT_S)
            assert from_peer.recv(1) == b""
            assert not started.is_over()
            assert select.select([from_store], [], [], 0)[0] == []  # nothing to read, not its end either
            started.kill()
