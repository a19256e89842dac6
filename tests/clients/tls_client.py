"""Run by test_sdk_tls.py: the unmodified `e2b` package, told a domain, a key and whom to trust, no more."""

from __future__ import annotations

import json

import httpx
from e2b import Sandbox

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(self.headers).lower().encode())
server = http.server.HTTPServer(("127.0.0.1", 8123), Handler)
print("listening", flush=True)
server.serve_forever()
"""


def main() -> None:
    sandbox = Sandbox.create(
        "base",
        timeout=300,
        request_timeout=120,
        network={"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}"},
    )
    try:
        use(sandbox)
    finally:
        sandbox.kill()


def use(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo over TLS").stdout == "over TLS\n"
    sandbox.files.write("/home/user/server.py", SERVER)

    link = sandbox.download_url("/home/user/server.py", use_signature_expiration=60)
    assert link.startswith(f"https://{sandbox.get_host(49983)}/"), link
    assert httpx.get(link).text == SERVER
    assert httpx.get(link.replace("server.py", "other.py")).status_code == 401
    put = httpx.post(sandbox.upload_url("/tmp/up"), files={"file": ("up", b"put")})
    assert put.status_code == 200, put.text
    assert sandbox.files.read("/tmp/up") == "put"

    command = sandbox.commands.run("exec python3 server.py", background=True, timeout=0)
    for stdout, _, _ in command:
        if stdout and "listening" in stdout:
            break
    url = f"https://{sandbox.get_host(8123)}/"
    assert httpx.get(url).status_code == 403
    answer = httpx.get(url, headers={"e2b-traffic-access-token": sandbox.traffic_access_token or ""})
    assert answer.status_code == 200, answer.text
    for line in (
        "host: localhost:8123\n",
        f"x-forwarded-host: {sandbox.get_host(8123)}\n",
        "x-forwarded-proto: https\n",
    ):
        assert line in answer.text, answer.text
    assert (sandbox.traffic_access_token or "?") not in answer.text
    command.kill()
    print(json.dumps({"host": sandbox.get_host(8123)}))


if __name__ == "__main__":
    main()
