"""What a sandbox does, through the unmodified E2B SDK. Run it after `eval "$(aenv env)"`."""

from __future__ import annotations

import os
import time
import urllib.request

from e2b import PtySize, Sandbox

BEGUN = time.monotonic()


def say(message: str) -> None:
    """One line with the seconds since the start."""
    print(f"  [{time.monotonic() - BEGUN:5.1f} s] {message}", flush=True)


def fetch(sandbox: Sandbox, port: int) -> str:
    """GET / of a service inside the sandbox, through the node's proxy (routed by two headers)."""
    request = urllib.request.Request(
        os.environ["E2B_SANDBOX_URL"],
        headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def main() -> None:
    """Create, use and remove one sandbox."""
    sandbox = Sandbox.create("base", timeout=300)
    try:
        say(f"created the sandbox {sandbox.sandbox_id}")

        kernel = sandbox.commands.run("uname -sr && whoami && python3 --version")
        say("commands: " + ", ".join(kernel.stdout.split("\n")[:3]))

        sandbox.files.write("/home/user/greeting.txt", "hello from outside\n")
        say("a file, written and read back: " + sandbox.files.read("/home/user/greeting.txt").strip())

        # The server says when it listens, so that nothing has to be guessed or waited for.
        server = sandbox.commands.run(
            'python3 -u -c "import http.server as h; '
            "s = h.HTTPServer(('', 8080), h.SimpleHTTPRequestHandler); "
            "print('listening'); s.serve_forever()\"",
            background=True,
            timeout=0,
        )
        for stdout, _, _ in server:
            if stdout and "listening" in stdout:
                break
        say(f"a web server in the background, process {server.pid}")
        say("its page through the proxy lists greeting.txt: " + str("greeting.txt" in fetch(sandbox, 8080)))
        server.kill()

        shown = bytearray()
        terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
        sandbox.pty.send_stdin(terminal.pid, b"tty && exit\n")
        terminal.wait(on_pty=shown.extend)
        lines = [line for line in shown.decode(errors="replace").splitlines() if line.startswith("/dev/pts/")]
        say(f"a terminal: {lines[0] if lines else shown!r}")
    finally:
        sandbox.kill()
    say("killed it")


if __name__ == "__main__":
    main()
