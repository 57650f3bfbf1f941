"""A reverse proxy on loopback that takes a prefix off and says so, as nginx and Traefik do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

#: What is between two neighbours only, and what the server's own library adds.
_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@contextlib.contextmanager
def serve_below(prefix: str, target: str) -> Iterator[str]:
    """Address of a proxy that shows ``target`` below ``prefix``, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            sent = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
            sent["X-Forwarded-Prefix"] = prefix
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            address = target + self.path.removeprefix(prefix)
            with (
                contextlib.suppress(httpx.TransportError, OSError),
                httpx.Client(timeout=120) as http,
                http.stream(self.command, address, headers=sent, content=body) as answer,
            ):
                self.send_response(answer.status_code)
                for name, value in answer.headers.multi_items():
                    if name.lower() not in _OWN_HEADERS:
                        self.send_header(name, value)
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)
                    self.wfile.flush()

        do_GET = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
