"""A local hub with one model, which speaks the part of Hugging Face's protocol that readers use."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`files` of `org/model` at COMMIT; `broken` names a file that is sent in half."""

    files: dict[str, bytes]
    url: str = ""
    broken: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def respond(self, *, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if "/org/gated" in path:
                return self.refuse(403, "GatedRepo")
            if "/org/model" not in path:
                return self.refuse(401, "RepoNotFound")
            for start in ("/api/models/org/model/revision/", "/api/models/org/model"):
                if path.startswith(start):
                    if path.removeprefix(start) not in ("", "main", COMMIT):
                        return self.refuse(404, "RevisionNotFound")
                    siblings = [{"rfilename": name} for name in hub.files]
                    info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
                    return self.send(json.dumps(info).encode(), body)
            name = path.partition("/resolve/")[2].partition("/")[2]
            if name not in hub.files:
                return self.refuse(404, "EntryNotFound")
            return self.send(hub.files[name], body, half=name == hub.broken)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, data: bytes, body: bool, *, half: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if half else data)
            if half:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
