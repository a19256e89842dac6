"""The server over real HTTP, with kernels that do what their code says in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from agentenv.interpreter import contexts as contexts_module
from agentenv.interpreter import server as server_module
from agentenv.interpreter.contexts import CannotStart, Contexts, KernelDied
from agentenv.interpreter.environment import Environment
from agentenv.interpreter.languages import LANGUAGES
from agentenv.interpreter.messages import Message
from agentenv.interpreter.server import application


def said(kind: str, **content: Any) -> Message:
    return {"msg_type": kind, "content": content, "header": {"date": "now"}}


class Told:
    """A kernel whose code is a word: `say X`, `wait` (until interrupted), `stuck` (for ever), `die`."""

    def __init__(self, name: str, cwd: str) -> None:
        self.name, self.cwd = name, cwd
        self.ran: list[str] = []
        self.told = self.restarts = 0
        self.ended = False
        self.interrupted = asyncio.Event()
        self.waiting = asyncio.Event()
        self._busy = asyncio.Lock()  # a kernel does one thing after another

    async def execute(
        self, code: str, *, silent: bool = False, counted: bool = True
    ) -> AsyncGenerator[Message, None]:
        self.ran.append(code)
        busy = self._busy
        await busy.acquire()
        word, _, rest = code.partition(" ")
        try:
            if not silent:
                self.told += counted
                yield said("execute_input", execution_count=self.told)
            if word == "say":
                yield said("stream", name="stdout", text=rest)
            elif word == "die":
                raise KernelDied
            elif word in ("wait", "stuck"):
                self.waiting.set()
                await (self.interrupted.wait() if word == "wait" else asyncio.Event().wait())
            yield said("status", execution_state="idle")
        finally:
            if word != "stuck":  # that one goes on, whoever listens
                busy.release()

    async def interrupt(self) -> None:
        self.interrupted.set()

    async def restart(self) -> None:
        self.restarts += 1
        self._busy = asyncio.Lock()

    async def end(self) -> None:
        self.ended = True


class Server:
    """The server on loopback, with what it was made of."""

    def __init__(self, client: httpx.AsyncClient, kernels: list[Told]) -> None:
        self.client, self.kernels = client, kernels

    async def execute(self, code: str, **more: object) -> list[dict[str, Any]]:
        answer = await self.client.post("/execute", json={"code": code, **more})
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    async with serving(tmp_path) as running:
        yield running


@asynccontextmanager
async def serving(home: Path, prepared: Collection[str] = ("python",)) -> AsyncIterator[Server]:
    kernels: list[Told] = []

    async def start(name: str, cwd: str) -> Told:
        if name == "broken":
            raise RuntimeError("no")
        kernels.append(Told(name, cwd))
        return kernels[-1]

    environment = Environment("http://127.0.0.1:9/envs", home / "none")
    contexts = Contexts(str(home), environment, lambda: ["python3", "bash", "broken"], start)
    config = uvicorn.Config(application(contexts, prepared), port=0, log_level="warning", ws="none")
    uvicorn_server = uvicorn.Server(config)
    uvicorn_server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(uvicorn_server.serve())
    while not uvicorn_server.started:
        await asyncio.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield Server(client, kernels)
    finally:
        uvicorn_server.should_exit = True
        await task
    assert all(kernel.ended for kernel in kernels)


async def test_execution(server: Server) -> None:
    assert (await server.client.get("/health")).json() == "OK"
    assert await server.execute("say hi") == [
        {"type": "number_of_executions", "execution_count": 1},
        {"type": "stdout", "text": "hi", "timestamp": "now"},
        {"type": "end_of_execution"},
    ]
    assert [kernel.name for kernel in server.kernels] == ["python3"]


async def test_variables_hold_for_one_execution(server: Server) -> None:
    await server.execute("say hi", env_vars={"AENV_T": "1"})
    *_, first, code, last = server.kernels[0].ran
    assert "'AENV_T': '1'" in first
    assert code == "say hi"
    assert "'AENV_T': None" in last


async def test_contexts_that_are_there_from_the_start(tmp_path: Path) -> None:
    async with serving(tmp_path, ("bash", "python", "r")) as server:
        listed = (await server.client.get("/contexts")).json()
        assert sorted(each["language"] for each in listed) == ["bash", "python"]
        ran = {kernel.name: kernel.ran for kernel in server.kernels}
        assert ran == {"bash": [LANGUAGES["bash"].prepare], "python3": [LANGUAGES["python"].prepare]}


async def test_rehearsals_are_over_when_somebody_comes(tmp_path: Path) -> None:
    async with serving(tmp_path, ("bash", "python")) as server:
        ran = {kernel.name: kernel.ran for kernel in server.kernels}
        assert "end_of_execution" in (await server.client.post("/rehearse")).text
        sets, code, unsets = ran["python3"][1:]
        assert code == LANGUAGES["python"].rehearse
        assert ("'AENV_REHEARSAL': ''" in sets, "'AENV_REHEARSAL': None" in unsets) == (True, True)
        assert (await server.execute("say a"))[0]["execution_count"] == 1
        await server.execute("say b")
        assert ran["python3"][4:] == [LANGUAGES["python"].inherit, "say a", "say b"]
        await server.client.post("/rehearse")
        assert ran["python3"][-1] == "say b"
        assert ran["bash"].count(LANGUAGES["bash"].rehearse) == 3  # to be prepared, and twice


async def test_a_kernel_that_does_not_start_from_the_start(tmp_path: Path) -> None:
    async def start(name: str, cwd: str) -> Told:
        raise OSError("no")

    environment = Environment("http://127.0.0.1:9/envs", tmp_path / "none")
    with pytest.raises(ExceptionGroup) as failed:
        await Contexts(str(tmp_path), environment, lambda: ["bash"], start).prepare(["bash"])
    assert failed.group_contains(CannotStart, match="the kernel bash does not start: no")


async def test_contexts(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    made = (await server.client.post("/contexts", json={"language": "SH", "cwd": str(other)})).json()
    assert (made["language"], made["cwd"]) == ("bash", str(other))
    listed = (await server.client.get("/contexts")).json()
    assert [each["language"] for each in listed] == ["python", "bash"]
    await server.execute("say x", context_id=made["id"])
    assert server.kernels[1].ran == ["say x"]  # nothing inherited: it was started here
    assert (await server.client.post(f"/contexts/{made['id']}/restart")).status_code == 200
    assert server.kernels[1].restarts == 1
    assert (await server.client.delete(f"/contexts/{made['id']}")).status_code == 200
    assert server.kernels[1].ended
    assert len((await server.client.get("/contexts")).json()) == 1


async def test_the_default_of_a_language_is_made_once(server: Server) -> None:
    await asyncio.gather(*(server.execute("say x", language="bash") for _ in range(5)))
    assert [kernel.name for kernel in server.kernels] == ["python3", "bash"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/execute", {"code": "x", "context_id": "a", "language": "b"}, 400, "Only one of"),
        ("/execute", {"code": "x", "context_id": "nobody"}, 404, "Context nobody not found"),
        ("/execute", {"code": "x", "language": "cobol"}, 500, "no kernel for the language cobol"),
        ("/execute", {"code": "x", "language": "broken"}, 500, "does not start"),
        ("/execute", {}, 400, "there is no code"),
        ("/execute", {"code": 1}, 400, "code is not text"),
        ("/execute", {"code": "x", "env_vars": {"a": 1}}, 400, "env_vars"),
        ("/execute", [], 400, "not an object"),
        ("/contexts", {"cwd": "/nowhere"}, 500, "not a directory"),
        ("/contexts/nobody/restart", {}, 404, "not found"),
    ],
)
async def test_what_is_refused(server: Server, path: str, body: object, status: int, said: str) -> None:
    answer = await server.client.post(path, json=body)
    assert answer.status_code == status
    assert said in answer.text


async def test_a_body_that_is_no_json(server: Server) -> None:
    assert (await server.client.post("/execute", content=b"{")).status_code == 400


async def test_a_kernel_that_dies_is_told_as_an_error(server: Server) -> None:
    lines = await server.execute("die")
    assert lines[1]["name"] == "ContextRestarting"
    assert lines[-1] == {"type": "end_of_execution"}
    assert (await server.execute("say on"))[1]["text"] == "on"


async def leave(server: Server, code: str) -> None:
    """Ask for an execution and go away while it runs."""
    async with server.client.stream("POST", "/execute", json={"code": code}) as answer:
        async for _ in answer.aiter_lines():
            await server.kernels[0].waiting.wait()
            return


async def test_a_client_that_leaves_stops_its_code(server: Server) -> None:
    await leave(server, "wait")
    assert (await server.execute("say next"))[1]["text"] == "next"
    assert server.kernels[0].interrupted.is_set()
    assert server.kernels[0].restarts == 0


async def test_code_that_does_not_stop_loses_its_kernel(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts_module, "INTERRUPT_LIMIT_S", 0.05)

    await leave(server, "stuck")
    assert (await server.execute("say next"))[1]["text"] == "next"
    assert server.kernels[0].restarts == 1


async def test_lines_come_while_nothing_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 0.02)
    async with server.client.stream("POST", "/execute", json={"code": "wait"}) as answer:
        lines = answer.aiter_lines()
        kinds = [json.loads(await anext(lines))["type"] for _ in range(3)]
        server.kernels[0].interrupted.set()
        rest = [json.loads(line)["type"] async for line in lines]
    assert kinds == ["number_of_executions", "keepalive", "keepalive"]
    assert rest[-1] == "end_of_execution"


async def test_one_after_another_in_one_context(server: Server) -> None:
    first = asyncio.create_task(server.execute("wait"))
    await server.kernels[0].waiting.wait()
    second = asyncio.create_task(server.execute("say two"))
    done, _ = await asyncio.wait((second,), timeout=0.1)
    assert not done
    server.kernels[0].interrupted.set()
    await first
    assert (await second)[1]["text"] == "two"


async def test_other_origins_may_call(server: Server) -> None:
    answer = await server.client.get("/health", headers={"Origin": "https://example.org"})
    assert answer.headers["access-control-allow-origin"] == "*"
