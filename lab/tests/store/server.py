"""An S3 server (moto), which can be told to fail. Prints its port, and serves until it is killed.

GET /lab/state                       counts since the last reset, as JSON
GET /lab/reset?fail=N&status=S&slow=MS&rate=B&cut=FORM&conflicts=N
    from now on every Nth request is answered with S, 0: none; each takes MS milliseconds longer; all bodies together come at B
    bytes per second; listings end after two keys (FORM: token, marker, v1, silent); the first N writes of an index conflict with others
"""
import io
import json
import re
import sys
import threading
import time
import urllib.parse

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


ANYBODY = "AWS4-HMAC-SHA256 Credential=AKIALAB/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Faulty:
    def __init__(self, app):
        self.app = app
        self.lock = threading.Lock()
        self.link = threading.Lock()
        self.reset(0, 503, 0)

    def reset(self, fail, status, slow, rate=0, cut="", conflicts=0):
        self.fail, self.status, self.slow, self.rate, self.cut, self.conflicts = fail, status, slow, rate, cut, conflicts
        self.requests, self.indexes, self.failed, self.put_bytes, self.under_way, self.most = 0, 0, 0, 0, 0, 0

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        if path.startswith("/lab/"):
            return self.control(path, environ, start_response)
        # Who comes without credentials reads as from any web server; moto would want a public bucket for that.
        environ.setdefault("HTTP_AUTHORIZATION", ANYBODY)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self.lock:
            self.requests += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            fails = self.fail and self.requests % self.fail == 0
            self.indexes += path.endswith(".towline")
            self.failed += bool(fails)
            if environ["REQUEST_METHOD"] == "PUT":
                self.put_bytes += len(body)
        try:
            if self.slow:
                time.sleep(self.slow / 1000)
            # In small parts, as a link is shared.
            for part in range(0, len(body) if self.rate else 0, 16384):
                with self.link:
                    time.sleep(min(16384, len(body) - part) / self.rate)
            if environ["REQUEST_METHOD"] == "PUT" and path.endswith(".towline") and self.conflicts:
                self.conflicts -= 1
                answer = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
                start_response("409 Conflict", [("Content-Length", str(len(answer)))])
                return [answer]
            if fails:
                answer = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                start_response(f"{self.status} Fault", [("Content-Length", str(len(answer)))])
                return [answer]
            environ["wsgi.input"] = io.BytesIO(body)
            if self.cut and "list-type=2" in environ["QUERY_STRING"]:
                return self.cut_listing(environ, start_response)
            return self.app(environ, start_response)
        finally:
            with self.lock:
                self.under_way -= 1

    def cut_listing(self, environ, start_response):
        query = urllib.parse.parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        query["max-keys"] = ["2"]
        if self.cut == "v1":
            del query["list-type"]
        environ["QUERY_STRING"] = urllib.parse.urlencode(query, doseq=True)
        head = []
        answer = b"".join(self.app(environ, lambda *parts: head.extend(parts))).decode()
        if self.cut != "v1":
            keys = re.findall("<Key>(.*?)</Key>", answer)
            marker = f"<NextMarker>{keys[-1]}</NextMarker>" if keys and self.cut == "marker" else ""
            answer = re.sub("<NextContinuationToken>.*?</NextContinuationToken>", marker, answer)
        if self.cut == "silent":
            answer = answer.replace("<IsTruncated>true</IsTruncated>", "<IsTruncated>false</IsTruncated>")
        headers = [(name, value) for name, value in head[1] if name.lower() != "content-length"]
        start_response(head[0], headers + [("Content-Length", str(len(answer.encode())))])
        return [answer.encode()]

    def control(self, path, environ, start_response):
        with self.lock:
            if path == "/lab/reset":
                asked = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"]))
                numbers = [("fail", 0), ("status", 503), ("slow", 0), ("rate", 0)]
                numbers = [int(asked.get(key, default)) for key, default in numbers]
                self.reset(*numbers, asked.get("cut", ""), int(asked.get("conflicts", 0)))
            state = {key: getattr(self, key) for key in ["requests", "indexes", "failed", "put_bytes", "most"]}
        answer = json.dumps(state).encode()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_):
        pass


server = make_server("127.0.0.1", 0, Faulty(DomainDispatcherApplication(create_backend_app)), threaded=True, request_handler=Quiet)
print(f"listening {server.port}", flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
try:
    threading.Event().wait()
except KeyboardInterrupt:
    sys.exit(0)
