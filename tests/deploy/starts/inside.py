"""Runs inside a pod's view: starts the container's program and asks its startup probe until that succeeds. A program without
a probe, such as an init container's, has to end well, or to log an event.

Reads what to do as JSON from its one argument, and prints what came of it as JSON. Standard library only.
"""

import http.client
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

ASK_S = 0.2
STOP_S = 60.0
ENGINE = {
    "version": "0.5.23", "device": "cpu", "dtype": "bfloat16", "tp_size": 1, "model_path": "/m", "weight_version": "1",
    "incremental_streaming_output": True, "enable_deterministic_inference": True,
}  # fmt: skip


class ServedEngine(http.server.BaseHTTPRequestHandler):
    """In place of SGLang, which needs the device: it is healthy."""

    def do_GET(self) -> None:
        body = json.dumps(ENGINE).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Hub(http.server.BaseHTTPRequestHandler):
    """In place of Hugging Face, for the real `hf download`: each repository has one file."""

    def do_GET(self) -> None:
        path, self.close_connection = self.path.partition("?")[0], True
        answer: Any = {}
        if path.startswith("/api/"):
            answer = {"id": "a/b", "sha": "a" * 40, "siblings": [{"rfilename": "config.json"}]}
            if "/tree/" in path:
                answer = [{"type": "file", "path": "config.json", "size": 2, "oid": "e"}]
        body = json.dumps(answer).encode()
        self.send_response(200)
        for name, value in {"content-length": str(len(body)), "etag": '"e"', "x-repo-commit": "a" * 40}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def serve(port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    serve(wanted["engine_port"], ServedEngine)
    serve(wanted["hub_port"], Hub)
    process = subprocess.Popen(wanted["command"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    ended, until = threading.Event(), time.monotonic() + wanted["timeout_s"]
    said = (0, "")
    while process.poll() is None and time.monotonic() < until:
        logged = not wanted["event"] or any(wanted["event"] in line for line in list(lines))
        if wanted["port"]:
            said = ask(wanted["port"], wanted["path"])
            waits = not wanted["waits"] or wanted["waits"] in ask(wanted["port"], "/readyz")[1]
            if said[0] == 200 and waits and logged:
                break
        elif wanted["event"] and logged:
            break
        ended.wait(ASK_S)
    if wanted["port"]:
        started = process.poll() is None and said[0] == 200 and time.monotonic() < until
    else:
        started = process.poll() == 0 or (process.poll() is None and time.monotonic() < until)
    print_result(process, reader, lines, started=started, readyz=ask(wanted["port"], "/readyz")[1] if wanted["port"] else "")


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def print_result(
    process: "subprocess.Popen[str]", reader: threading.Thread, lines: list[str], *, started: bool, readyz: str
) -> None:
    """Ends the program, as a kubelet does."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    reader.join(STOP_S)
    sys.stdout.write(json.dumps({"started": started, "status": status, "readyz": readyz, "log": "".join(lines)[-3000:]}))


if __name__ == "__main__":
    main()
