"""Templates built by the unmodified `e2b` package, on a real node and in real machines."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import BuildException, NotFoundException, Sandbox, Template, TemplateException, wait_for_file
from e2b.template.types import BuildInfo, TemplateBuildStatus

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

BUILD_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> Iterator[RunningNode]:
    """A node of this module's own, which E2B's clients in this process use."""
    running = node_factory("builds", build_from_paths="true")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.client_environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def sandbox_of(node: RunningNode) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes and kills them at the end of the test."""
    made: list[Sandbox] = []

    def make(template: str, **given: Any) -> Sandbox:
        made.append(Sandbox.create(template, **{"timeout": 300, "request_timeout": 120, **given}))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


class Told:
    """What a build told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, entry: Any) -> None:
        self.lines.append(entry.message)

    def has(self, words: str) -> bool:
        return any(words in line for line in self.lines)


def machines_made(node: RunningNode) -> int:
    """How many machines the node has ever started for builds."""
    return node.log.read_text().count(": build machine ")


def ended(build: BuildInfo) -> Any:
    """A background build's status once it has ended."""
    deadline = time.monotonic() + BUILD_LIMIT_S
    while (status := Template.get_build_status(build)).status in (
        TemplateBuildStatus.WAITING,
        TemplateBuildStatus.BUILDING,
    ):
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context with a directory, links and modes."""
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "test.txt").write_text("This is a test file.")
    (folder / "deep" / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "deep" / "tool.sh").chmod(0o755)
    (folder / "symlink.txt").symlink_to("test.txt")
    (folder / "dangling.txt").symlink_to("12345test.txt")
    os.link(folder / "test.txt", folder / "hard.txt")
    return tmp_path


def test_a_template_with_everything(
    node: RunningNode, context: Path, sandbox_of: Callable[..., Sandbox]
) -> None:
    template = (
        Template(file_context_path=str(context))
        .from_base_image()
        .set_envs({"GREETING": "hello"})
        .set_envs({"PLACE": "$GREETING world", "PATH": "/opt/tools:$PATH"})
        .copy("folder/*", "folder")
        .copy("folder/test.txt", "/srv/renamed.txt", user="root", mode=0o600)
        .run_cmd('cat folder/symlink.txt; echo "$PLACE" > said.txt')
        .set_workdir("/app/deep")
        .run_cmd(["pwd", "whoami"], user="root")
        .set_user("builder")
        .set_workdir("mine/deep")
        .run_cmd("touch here && id -un > who")
        .set_workdir("/home/builder")
        .run_cmd("sleep 4721 & echo left")
        .set_start_cmd("sh -c 'echo up > /tmp/up; exec sleep 4722'", wait_for_file("/tmp/up"))
    )
    told = Told()
    built = Template.build(template, "everything:v1", tags=["latest"], on_build_logs=told)
    assert sorted(built.tags) == ["latest", "v1"]
    assert told.has("[stdout]: This is a test file.") and told.has("[stdout]: /app/deep")
    assert told.has("Template is ready")

    sandbox = sandbox_of("everything:latest")
    look = (
        "id -un; pwd; echo $GREETING, $PLACE; echo ${PATH%%:*};"
        " cat ~user/said.txt /app/deep/mine/deep/who;"
        " stat -c '%U %G %a' /srv/renamed.txt ~user/folder/deep/tool.sh ~user/folder;"
        " readlink ~user/folder/symlink.txt ~user/folder/dangling.txt; ~user/folder/deep/tool.sh;"
        " stat -c %h ~user/folder/hard.txt; pgrep -fc 'sleep 4721$'; pgrep -fc 'sleep 4722$'"
    )
    assert sandbox.commands.run(f"{look} || true").stdout.splitlines() == [
        "builder",
        "/home/builder",
        "hello, hello world",
        "/opt/tools",
        "hello world",
        "builder",
        "root root 600",
        "user user 755",
        "user user 755",
        "test.txt",
        "12345test.txt",
        "tool",
        "2",
        "0",
        "1",
    ]

    before = machines_made(node)
    assert before > 0
    again = Told()
    second = Template.build(template, "everything-again", on_build_logs=again)
    assert again.has("CACHED all of it")
    assert again.has("already cached"), "nothing is uploaded twice"
    assert machines_made(node) == before, "a record is made, and no machine"
    assert second.template_id != built.template_id
    with pytest.raises(NotFoundException, match="latest, v1"):
        Sandbox.create("everything")


def test_a_changed_last_step_runs_alone(node: RunningNode, sandbox_of: Callable[..., Sandbox]) -> None:
    common = Template().from_template("base").run_cmd("date +%s.%N > first; cat first")
    told = Told()
    Template.build(common.run_cmd("echo one > second"), "changed", on_build_logs=told)
    first = next(line for line in told.lines if line.startswith("[stdout]: 1"))
    other = Template().from_template("base").run_cmd("date +%s.%N > first; cat first")
    again = Told()
    Template.build(other.run_cmd("echo two > second"), "changed", on_build_logs=again)
    assert again.has("CACHED [1/2]") and again.has("[2/2] RUN echo two")
    assert not any(line.startswith("[stdout]: 1") for line in again.lines)
    sandbox = sandbox_of("changed")
    assert sandbox.commands.run("cat first second").stdout == first.removeprefix("[stdout]: ") + "\ntwo\n"

    forced = Told()
    skipping = Template().from_template("base").skip_cache().run_cmd("date +%s.%N > first; cat first")
    Template.build(skipping.run_cmd("echo two > second"), "changed", on_build_logs=forced)
    assert any(line.startswith("[stdout]: 1") and line != first for line in forced.lines)
    assert sandbox.is_running(), "what runs from the build before goes on"


def failing_steps() -> Iterator[Any]:
    base = Template().from_template("base")
    text = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
    yield pytest.param(base.run_cmd("whoami", user="root123"), text, "run_cmd", id="user")
    base = Template().from_template("base").run_cmd("true")
    yield pytest.param(base.run_cmd("cat missing"), "exit status 1", "run_cmd", id="status")
    base = Template().from_template("base")
    yield pytest.param(base.set_user("; exit 1"), "cannot be a user's name", "set_user", id="name")
    base = Template().from_template("base").set_user("root")
    yield pytest.param(base.set_workdir("/etc/passwd"), "/etc/passwd", "set_workdir", id="workdir")
    nothing = Template().from_template("this-template-does-not-exist")
    yield pytest.param(nothing, "not found", "from_template", id="template")
    start = Template().from_template("base").set_start_cmd("./missing", wait_for_file("/never"))
    yield pytest.param(start, "start command failed: exit status 127", "set_start_cmd", id="start")


@pytest.mark.parametrize(("template", "words", "method"), list(failing_steps()))
def test_a_failure_is_tied_to_its_step(node: RunningNode, template: Any, words: str, method: str) -> None:
    with pytest.raises(BuildException) as caught:
        Template.build(template, "failing")
    assert words in str(caught.value)
    frames = [entry for entry in caught.traceback if Path(entry.path).name == Path(__file__).name]
    assert any(f".{method}(" in str(entry.statement) for entry in frames), (
        "the SDK shows where it was written"
    )
    assert not [
        each for each in listed(node) if each["aliases"] == ["failing"] and each["buildStatus"] == "ready"
    ]


def listed(node: RunningNode) -> list[dict[str, Any]]:
    with node.client() as client:
        return list(client.get("/templates").json())


def test_ten_at_once_are_one_build(node: RunningNode) -> None:
    name = f"many-{uuid.uuid4().hex[:8]}"
    outcomes: list[BuildInfo | Exception] = []

    def build() -> None:
        template = Template().from_template("base").run_cmd("sleep 2; date +%s.%N > when; cat when")
        try:
            outcomes.append(Template.build(template, name))
        except Exception as error:  # shown below
            outcomes.append(error)

    threads = [threading.Thread(target=build) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BUILD_LIMIT_S)
    built = [each for each in outcomes if isinstance(each, BuildInfo)]
    assert len(built) == 10, outcomes
    lines = {
        entry.message
        for each in built
        for entry in Template.get_build_status(each).log_entries
        if entry.message.startswith("[stdout]: 1")
    }
    assert len(lines) == 1, "the command ran once, and all were told its output"


def test_background_cancel_and_tags(node: RunningNode) -> None:
    slow = Template().from_template("base").run_cmd("sleep 600")
    build = Template.build_in_background(slow, "cancelled")
    with node.client() as client:
        path = f"/templates/{build.template_id}/builds/{build.build_id}"
        deadline = time.monotonic() + BUILD_LIMIT_S
        while "RUN sleep 600" not in client.get(f"{path}/status").text:
            assert time.monotonic() < deadline
        assert client.delete(path).status_code == 204
        assert client.delete(path).status_code == 204
        status = client.get(f"{path}/status").json()
        assert (status["status"], status["reason"]["message"]) == ("error", "the build was cancelled")
        assert Template.exists("cancelled")
        assert client.delete(f"/templates/{build.template_id}").status_code == 204
    assert not Template.exists("cancelled")

    first = Template.build(Template().from_template("base"), "tagged:v1")
    assert Template.assign_tags("tagged:v1", ["production", "default"]).build_id == first.build_id
    second = Template.build(Template().from_template("base").run_cmd("true"), "tagged:v2")
    assert {(tag.tag, tag.build_id) for tag in Template.get_tags("tagged")} == {
        ("v1", first.build_id),
        ("production", first.build_id),
        ("default", first.build_id),
        ("v2", second.build_id),
    }
    Template.remove_tags("tagged", ["production", "v1"])
    assert {tag.tag for tag in Template.get_tags("tagged")} == {"default", "v2"}
    for wrong in (":tag", "tagged:"):
        with pytest.raises(TemplateException):
            Template.assign_tags("tagged:v2", wrong)


def test_images_copies_from_elsewhere_and_other_sizes(
    node: RunningNode, tmp_path: Path, sandbox_of: Callable[..., Sandbox]
) -> None:
    """An image without bash or useradd, more memory than usual, and files of another template."""
    Template.build(Template().from_template("base").run_cmd("mkdir out && echo made > out/a"), "maker")
    busybox = shutil.which("busybox")
    assert busybox is not None
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    shutil.copy(busybox, tree / "bin/busybox")
    for applet in ("sh", "cat", "id", "pwd", "mkdir", "free"):
        (tree / "bin" / applet).symlink_to("busybox")
    with node.client() as client:
        asked = client.post("/v3/templates", json={"name": "small", "memoryMB": 192, "cpuCount": 2}).json()
        path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
        body = {
            "fromImage": f"rootfs:{tree}",
            "steps": [
                {"type": "ENV", "args": ["A", "1"]},
                {"type": "RUN", "args": ["id -un; pwd; mkdir here"]},
                {"type": "COPY", "args": ["/home/user/ou*", "here/"], "from": "maker"},
                {"type": "RUN", "args": ["cat here/a"]},
            ],
        }
        assert client.post(f"/v2{path}", json=body).status_code == 202
        status = ended(BuildInfo(asked["templateID"], asked["buildID"], "small", "small"))
    told = [entry.message for entry in status.log_entries]
    assert status.status is TemplateBuildStatus.READY, told
    assert {"[stdout]: user", "[stdout]: /home/user", "[stdout]: made"} <= set(told)
    sandbox = sandbox_of("small")
    info = sandbox.get_info()
    assert (info.cpu_count, info.memory_mb) == (2, 192)
    assert sandbox.commands.run("id -un; pwd; echo $A; cat here/a").stdout == "user\n/home/user\n1\nmade\n"


def test_a_node_that_dies_in_mid_build(node: RunningNode) -> None:
    slow = Template().from_template("base").run_cmd("echo kept").run_cmd("sleep 600")
    build = Template.build_in_background(slow, "interrupted")
    with node.client() as client:
        path = f"/templates/{build.template_id}/builds/{build.build_id}/status"
        deadline = time.monotonic() + BUILD_LIMIT_S
        while "RUN sleep 600" not in client.get(path).text:
            assert time.monotonic() < deadline
    node.kill()
    node.start()
    status = Template.get_build_status(build)
    assert status.status is TemplateBuildStatus.ERROR
    assert status.reason is not None
    assert status.reason.message == "the node ended while it was built"
    told = Told()
    Template.build(
        Template().from_template("base").run_cmd("echo kept").run_cmd("true"),
        "interrupted",
        on_build_logs=told,
    )
    assert told.has("CACHED [1/2] RUN echo kept"), "the steps before are kept"
