"""Builds over parts in memory: what runs, what is kept and shared, and what is left when it ends badly."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.building import builder
from agentenv.building.definition import Step, define
from agentenv.errors import Conflict, GuestFault, HostFault, InvalidRequest, NotFound, StoreFull
from agentenv.image.config import ImageConfig
from agentenv.image.credentials import Credentials
from agentenv.observe.events import Events
from agentenv.observe.metrics import Metrics
from agentenv.sandbox import starting
from agentenv.sandbox.requests import Stopping
from agentenv.snapshot.records import GuestSettings, Start
from agentenv.template.records import Build
from agentenv.template.states import BuildState
from support.building_parts import Workplace
from support.sandbox_parts import quiet, wanted

FILES = "f" * 64


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Workplace]:
    place = Workplace(tmp_path)
    await place.start()
    await place.node.prepare()
    yield place
    await place.builder.stop()
    await place.node.service.stop()


def run(text: str, **given: Any) -> Step:
    return Step("RUN", (text,), **given)


def begin(place: Workplace, *steps: Step, name: str = "mine", **given: Any) -> Build:
    if "image" not in given:
        given.setdefault("template", "base")
    sizes = {key: given.pop(key) for key in ("vcpus", "memory_mib") if key in given}
    _, build = place.builder.open(name, **sizes)
    place.builder.begin(build, define(steps=steps, **given))
    return build


async def ended(place: Workplace, build: Build) -> Build:
    if (task := place.builder._tasks.get(build.id)) is not None:
        await asyncio.gather(task, return_exceptions=True)
    return place.builder.find(build.template_id, build.id)


async def built(place: Workplace, *steps: Step, **given: Any) -> Build:
    build = await ended(place, begin(place, *steps, **given))
    assert build.state is BuildState.READY, (build.reason, told(place, build))
    return build


def told(place: Workplace, build: Build) -> list[str]:
    return [entry.message for entry in place.builder.status(build.template_id, build.id).entries]


def assert_clean(place: Workplace) -> None:
    """Nothing of a build is left but what is kept on purpose."""
    place.node.assert_empty()
    assert place.node.service.admission.promised.memory_mib == 0
    assert place.node.service.snapshots.check() == ()
    assert place.images.held == []


# Steps


async def test_steps_run_in_order_and_their_settings_hold_in_sandboxes(place: Workplace) -> None:
    steps = (
        Step("ENV", ("A", "1")),
        run("one"),
        Step("WORKDIR", ("/app",)),
        Step("RUN", ("two", "root")),
        Step("USER", ("me",)),
    )
    build = await built(place, *steps)
    assert place.ran == ["one", "two"]
    one, two = (each for each in place.commands if each.argv[0] == "/bin/bash")
    assert (one.user, one.workdir, dict(one.env)) == ("user", "/home/user", {"LANG": "C.UTF-8", "A": "1"})
    assert (two.user, two.workdir) == ("root", "/app")
    assert build.made is not None
    sandbox = (await place.node.service.create(wanted("mine"))).sandbox
    assert sandbox.guest == GuestSettings({"LANG": "C.UTF-8", "A": "1"}, "me", "/app")
    assert sandbox.template.build_id == build.id
    await place.node.service.kill(sandbox.id)
    assert_clean(place)


async def test_what_a_path_was_chosen_to_be_outlasts_the_profile(place: Workplace) -> None:
    await built(place, Step("ENV", ("PATH", "/opt/it's/bin:$PATH")), run("tool"), run("tool", login=False))
    login, plain = (each for each in place.commands if each.argv[0] in ("/bin/bash", "/bin/sh"))
    assert login.argv[-1].startswith("export PATH='/opt/it'\"'\"'s/bin:/usr/local/sbin:")
    assert login.argv[-1].endswith("\ntool")
    assert (plain.argv, plain.env["PATH"]) == (("/bin/sh", "-c", "tool"), plain.env["PATH"])


async def test_those_who_watch_are_told_of_each_state(place: Workplace) -> None:
    events, counts = Events(), Metrics(place.node.service, Events())
    place.builder.observe(events.built)
    place.builder.observe(counts.built)
    build = await built(place, run("one"))
    place.builder.open("other")
    await place.builder.cancel(place.builder.open("third")[1])
    seen = [(event.kind, event.build_id == build.id) for event in events.newest_first()][::-1]
    assert seen == [("build_started", True), ("build_ready", True), ("build_cancelled", False)]
    scrape = (await counts.of_node()).decode()
    assert 'aenv_builds_total{state="ready"} 1.0' in scrape
    assert 'aenv_builds_total{state="cancelled"} 1.0' in scrape
    assert place.builder.under_way == 0


async def test_a_second_build_needs_no_machine(place: Workplace) -> None:
    await built(place, run("one"), run("two"))
    assert place.machines_made == 1
    again = await built(place, run("one"), run("two"), name="other")
    assert place.machines_made == 0
    assert "CACHED all of it" in told(place, again)
    assert place.ran == ["one", "two"]


async def test_a_changed_last_step_reruns_only_it(place: Workplace) -> None:
    await built(place, run("one"), Step("WORKDIR", ("/a",)), run("two"))
    other = await built(place, run("one"), Step("WORKDIR", ("/a",)), run("three"), name="other")
    assert place.ran == ["one", "two", "three"]
    assert told(place, other)[1:4] == ["CACHED [1/3] RUN one", "[2/3] WORKDIR /a", "[3/3] RUN three"]


async def test_only_tags_and_variables_changed(place: Workplace) -> None:
    await built(place, run("one"))
    assert place.machines_made == 1
    await built(place, run("one"), Step("ENV", ("A", "1")), name="other")
    assert place.machines_made == 0
    sandbox = (await place.node.service.create(wanted("other"))).sandbox
    assert sandbox.guest.env["A"] == "1"


async def test_force_runs_all_and_a_forced_step_runs_from_there(place: Workplace) -> None:
    await built(place, run("one"), run("two"))
    await built(place, run("one"), run("two"), force=True)
    assert place.ran == ["one", "two"] * 2
    await built(place, run("one"), run("two", force=True))
    assert place.ran == ["one", "two"] * 2 + ["two"]
    await built(place, run("one"), run("two"))
    assert len(place.ran) == 5, "what was forced is what is known now"


async def test_templates_on_templates(place: Workplace) -> None:
    await built(place, run("one"), Step("USER", ("me",)), name="below", start=Start("serve", "up"))
    assert place.machines_made == 1
    first = await built(place, run("two"), template="below", name="above")
    assert place.ran == ["one", "serve", "up", "two", "serve", "up"], "a start command is inherited"
    assert place.machines_made == 2, "what it started must not go on beside: it is booted"
    command = next(each for each in place.commands if each.argv[-1] == "two")
    assert command.user == "me"
    assert first.made is not None and first.made.start.command == "serve"
    await built(place, run("two"), template="below", name="above", start=Start("other", "up"))
    assert place.ran[6:] == ["other", "up"]


async def test_other_sizes_are_booted_once(place: Workplace) -> None:
    build = await built(place, run("one"), memory_mib=1024, vcpus=2)
    assert place.machines_made == 2
    assert build.made is not None and (build.made.memory_mib, build.made.vcpus) == (1024, 2)
    await built(place, run("two"), memory_mib=1024, vcpus=2, name="other")
    assert place.machines_made == 1
    sandbox = (await place.node.service.create(wanted("other"))).sandbox
    assert (sandbox.memory_mib, sandbox.vcpus) == (1024, 2)


@pytest.mark.parametrize(
    ("config", "user", "workdir"),
    [
        (ImageConfig(), "user", None),
        (ImageConfig(user="node", workdir="/srv"), "node", "/srv"),
        (ImageConfig(user="root"), "root", None),
        (ImageConfig(workdir="/"), "user", None),
    ],
)
async def test_images(place: Workplace, config: ImageConfig, user: str, workdir: str | None) -> None:
    place.images.config = config
    secret = Credentials("name", "secret word")
    await built(place, run("one"), image="registry/image", credentials=secret)
    assert place.images.asked == [("registry/image", secret)]
    command = next(each for each in place.commands if each.argv[-1] == "one")
    assert (command.user, command.workdir) == (user, workdir)
    assert [each.argv[-2:] for each in place.commands if "sudo" in each.argv] == (
        [("user", "sudo")] if user == "user" else []
    )
    assert_clean(place)
    stored = b"".join(path.read_bytes() for path in place.node.settings.home.glob("aenv.db*"))
    assert b"secret word" not in stored
    place.machines_made  # noqa: B018
    await built(place, run("two"), image="registry/image", name="other")
    assert place.machines_made == 1, "the base is booted once"


async def test_room_on_the_disk(place: Workplace) -> None:
    for free_mib, disk_mib in ((0, 1024), (824, 1024), (825, 1025), (5000, 5200)):
        _, build = place.builder.open("mine", free_mib=free_mib)
        place.builder.begin(build, define(image="registry/image"))
        made = (await ended(place, build)).made
        assert made is not None and made.disk_mib == disk_mib
    with pytest.raises(InvalidRequest, match="minFreeDiskMb"):
        place.builder.open("mine", free_mib=-1)


async def test_room_on_the_disk_of_a_template(place: Workplace) -> None:
    below = (await built(place, run("one"), name="below")).made
    assert below is not None
    sizes = []
    for free_mib in (0, 100, below.disk_mib + 500):
        _, build = place.builder.open("above", free_mib=free_mib)
        place.builder.begin(build, define(template="below", steps=(run("two"),)))
        made = (await ended(place, build)).made
        assert made is not None
        sizes.append(made.disk_mib)
    assert sizes[:2] == [below.disk_mib] * 2
    assert sizes[2] >= below.disk_mib + 500
    assert place.node.hypervisor.booted[-1].disk_mib == sizes[2]
    grew = [each.disk_mib for each in place.node.identities if each.disk_mib is not None]
    assert grew == [sizes[2]], "only the one that grew"
    sandbox = (await place.node.service.create(wanted("above"))).sandbox
    assert sandbox.disk_mib == sizes[2]
    await place.node.service.kill(sandbox.id)
    assert_clean(place)


# Process 1


SYSTEMD = ImageConfig(entrypoint=("/sbin/init",), labels={"a": "b"}, exposed_ports=("80/tcp",))


def words_of_boots(place: Workplace) -> list[tuple[str, ...]]:
    """What the kernels of machines were told that booted since last looked."""
    words = [spec.words for spec in place.node.hypervisor.booted]
    place.node.hypervisor.booted.clear()
    return words


async def test_systemd_starts_when_the_steps_are_done(place: Workplace) -> None:
    place.images.config = SYSTEMD
    words_of_boots(place)
    made = (await built(place, run("one"), image="registry/image", start=Start("serve", "up"))).made
    assert made is not None
    assert (made.init, made.entrypoint, made.labels) == ("systemd", ("/sbin/init",), {"a": "b"})
    assert made.exposed_ports == ("80/tcp",)
    assert words_of_boots(place) == [(), ("agentenv.init=systemd",)]
    texts = [each.argv[-1] for each in place.commands if each.argv[0] != "/.agentenv/bin/busybox"]
    assert texts[-4:] == ["one", "--wait", "serve", "up"]
    sandbox = (await place.node.service.create(wanted("mine"))).sandbox
    assert sandbox.guest.init == "systemd"
    await place.node.service.pause(sandbox.id, memory=False)
    await place.node.service.connect(sandbox.id, 300)
    assert words_of_boots(place) == [("agentenv.init=systemd",)], "it boots as it did"
    await place.node.service.kill(sandbox.id)
    assert_clean(place)


async def test_what_is_built_on_a_template_with_systemd_has_it_too(place: Workplace) -> None:
    await built(place, image="registry/image", name="below", init="systemd")
    assert words_of_boots(place)[1:] == [(), ("agentenv.init=systemd",)]
    above = (await built(place, run("one"), name="above", template="below")).made
    assert above is not None
    assert above.init == "systemd"
    assert words_of_boots(place) == [(), ("agentenv.init=systemd",)]
    without = (await built(place, run("one"), name="without", template="below", init="agent")).made
    assert without is not None
    assert without.init == "agent"
    assert words_of_boots(place) == []
    assert_clean(place)


async def test_a_start_command_that_is_systemd(place: Workplace) -> None:
    made = (await built(place, run("one"), start=Start("/lib/systemd/systemd"))).made
    assert made is not None
    assert (made.init, made.start.command) == ("systemd", "")


async def test_systemd_that_does_not_come_up(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "SYSTEMD_LIMIT_S", 0.05)
    monkeypatch.setattr(starting, "RETRY_S", (0.001, 0.001))
    place.says["--wait"] = "starting\n"
    build = await ended(place, begin(place, run("one"), init="systemd"))
    assert build.reason is not None
    assert build.reason.step == "finalize"
    assert "systemd is still starting after" in build.reason.message
    assert_clean(place)


# Registries


async def test_credentials_go_to_one_registry(place: Workplace) -> None:
    secret = Credentials("name", "secret word")
    steps = [
        Step("COPY", ("/a", "/b"), source=f"image:{reference}")
        for reference in ("ghcr.io/tool", "other.example/private", "registry/hub")
    ]
    await built(place, *steps, image="ghcr.io/base", credentials=secret)
    given = dict(place.images.asked)
    assert given == {"ghcr.io/base": secret, "ghcr.io/tool": secret} | {
        "other.example/private": None,
        "registry/hub": None,
    }
    place.images.asked.clear()
    await built(place, steps[1], steps[0], name="other", credentials=secret)
    assert dict(place.images.asked) == {"other.example/private": secret, "ghcr.io/tool": None}


async def test_files_of_this_host_are_no_images_unless_allowed(place: Workplace) -> None:
    build = await ended(place, begin(place, image="rootfs:/"))
    assert build.reason is not None and build.reason.step == "base"
    assert "AENV_BUILD_FROM_PATHS" in build.reason.message
    assert place.images.asked == []


async def upload(place: Workplace, digest: str = FILES) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("a")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))

    async def body() -> AsyncIterator[bytes]:
        yield buffer.getvalue()

    await place.builder.contexts.receive(digest, body())


async def test_copy(place: Workplace) -> None:
    await upload(place)
    await built(place, Step("ENV", ("TO", "/srv")), Step("COPY", ("a", "$TO/b", "", "0600"), FILES))
    assert place.put == [b"a\nF 420 0 0 0 0 0 3\nabc.\n"]
    [command] = [each for each in place.commands if "/srv/b" in each.argv]
    assert command.argv[-5:] == ("/run/agentenv-copy", "/srv/b", "/home/user", "user", "0600")
    assert command.user == "root"


async def test_copy_from_a_template_and_an_image(place: Workplace) -> None:
    steps = (
        Step("COPY", ("/a", "/b"), source="base"),
        Step("COPY", ("/c", "/d", "root"), source="image:other"),
    )
    build = await built(place, *steps)
    assert place.images.asked == [("other", None)]
    collected = [each.argv[-2:] for each in place.commands if each.argv[-1] == "/.agentenv-collected"]
    assert collected == [("/a", "/.agentenv-collected"), ("/c", "/.agentenv-collected")]
    assert place.put == [b"\n.\n", b"\n.\n"]
    assert "Collecting /c from image:other" in told(place, build)
    await built(place, *steps, run("more"), name="other")
    assert len(place.put) == 2
    assert_clean(place)


# Failures


async def failed(place: Workplace, *steps: Step, **given: Any) -> tuple[str | None, str]:
    build = await ended(place, begin(place, *steps, **given))
    assert build.state is BuildState.ERROR and build.reason is not None
    await quiet()
    place.node.assert_empty()
    return build.reason.step, build.reason.message


async def test_a_failing_step_is_named(place: Workplace) -> None:
    place.failing["two"] = "exit status 3"
    assert await failed(place, run("one"), Step("ENV", ("A", "1")), run("two"), run("three")) == (
        "3",
        "failed to run command 'two': exit status 3",
    )
    assert place.ran == ["one", "two"]
    place.failing.clear()
    await built(place, run("one"), Step("ENV", ("A", "1")), run("two"))
    assert place.ran == ["one", "two", "two"], "what was done before is kept"
    with pytest.raises(NotFound):
        place.node.templates.get("mine:other")


async def test_what_is_missing(place: Workplace) -> None:
    step, message = await failed(place, template="nothing")
    assert (step, "not found" in message) == ("base", True)
    assert (await failed(place, image="missing/image"))[0] == "base"
    step, message = await failed(place, run("one"), Step("COPY", ("a", "b"), FILES))
    assert (step, "upload them again" in message) == ("2", True)
    assert (await failed(place, Step("COPY", ("a", "b"), source="nothing")))[0] == "1"
    await upload(place)
    assert await failed(place, Step("COPY", ("z", "b"), FILES)) == ("1", "source path does not exist: z")


async def test_a_start_command_that_fails(place: Workplace) -> None:
    place.steps.hold("run up")
    place.failing["serve"] = "exit status 127"
    step, message = await failed(place, start=Start("serve", "up"))
    assert (step, message) == ("finalize", "start command failed: exit status 127")
    place.steps.let_go("run up")


async def test_a_base_that_does_not_come_up_is_booted_again(place: Workplace) -> None:
    fault = GuestFault("the guest rebooted")
    place.steps.fail("agent", fault)
    assert await failed(place, memory_mib=256) == ("base", "the guest rebooted")
    assert place.machines_made == 2
    place.steps.mend("agent")
    await built(place, memory_mib=256)
    assert_clean(place)


@pytest.mark.parametrize("step", ["acquire", "restore", "agent", "capture", "run sync", "stop"])
async def test_a_host_that_fails_at_any_point(place: Workplace, step: str) -> None:
    fault = StoreFull("no space") if step == "capture" else HostFault("it failed")
    place.steps.fail(step, fault)
    assert (await failed(place, Step("ENV", ("A", "1")), run("one")))[0] == "2"
    place.steps.mend(step)
    assert_clean(place)
    await built(place, run("one"))


async def test_a_disk_that_cannot_be_written_ends_the_build(place: Workplace) -> None:
    place.steps.hold("run one")
    build = begin(place, run("one"))
    await place.steps.reached("run one")
    [machine] = place.node.hypervisor.machines.values()
    for told_twice in range(2):
        for listener in machine.events:
            listener(
                "BLOCK_IO_ERROR", {"action": "stop", "nospace": True, "reason": f"No space {told_twice}"}
            )
    place.failing["one"] = "the machine is gone"
    place.steps.let_go("run one")
    broken = await ended(place, build)
    assert broken.reason is not None
    assert (broken.reason.step, "cannot be written: No space 0" in broken.reason.message) == ("1", True)
    assert_clean(place)


async def test_an_end_that_cannot_be_recorded_is_recorded_later(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "RETRY_S", 0.01)
    place.failing["one"] = "exit status 1"
    place.steps.hold("run one")
    build = begin(place, run("one"))
    await place.steps.reached("run one")
    place.node.database.query("PRAGMA query_only=1")
    place.steps.let_go("run one")
    assert (await ended(place, build)).state is BuildState.BUILDING, "nothing can be written"
    place.node.database.query("PRAGMA query_only=0")
    while place.builder._owed:
        await asyncio.sleep(0.01)
    assert (await ended(place, build)).state is BuildState.ERROR
    assert_clean(place)


# At the same time


async def test_ten_at_once_are_one_build(place: Workplace) -> None:
    place.steps.hold("run one")
    builds = [begin(place, run("one"), name=f"t{number % 3}") for number in range(10)]
    await place.steps.reached("run one")
    await quiet(50)
    place.steps.let_go("run one")
    for build in builds:
        assert (await ended(place, build)).state is BuildState.READY
        assert "[stdout]: ran one" in told(place, build)
    assert place.ran == ["one"]
    assert_clean(place)


async def test_different_builds_go_on_side_by_side(tmp_path: Path) -> None:
    place = Workplace(tmp_path, builds_at_once=2)
    await place.start()
    await place.node.prepare()
    for text in ("a", "b", "c"):
        place.steps.hold(f"run {text}")
    builds = {text: begin(place, run(text), name=text) for text in ("a", "b", "c")}
    await place.steps.reached("run a")
    await place.steps.reached("run b")
    await quiet(50)
    assert "Waiting for other builds" in told(place, builds["c"])
    place.steps.let_go("run b")
    await place.steps.reached("run c")
    place.steps.let_go("run a")
    place.steps.let_go("run c")
    for build in builds.values():
        assert (await ended(place, build)).state is BuildState.READY
    assert_clean(place)
    await place.builder.stop()
    await place.node.service.stop()


async def test_the_last_asked_for_keeps_the_tag(place: Workplace) -> None:
    place.steps.hold("run slow")
    slow = begin(place, run("slow"))
    await place.steps.reached("run slow")
    quick = await built(place, run("quick"))
    place.steps.let_go("run slow")
    assert (await ended(place, slow)).state is BuildState.READY
    assert place.node.templates.get("mine").build_id == quick.id


# Cancelling


async def test_cancelled_while_it_runs(place: Workplace) -> None:
    place.steps.hold("run one")
    build = begin(place, run("one"))
    await place.steps.reached("run one")
    await place.builder.cancel(build)
    cancelled = place.builder.find("mine", build.id)
    assert cancelled.state is BuildState.CANCELLED
    assert await place.builder.cancel(cancelled) == cancelled
    assert_clean(place)
    with pytest.raises(NotFound, match="mine has no build that is ready"):
        place.node.templates.get("mine")


async def test_the_others_go_on_when_one_is_cancelled(place: Workplace) -> None:
    place.steps.hold("run one")
    first, second = begin(place, run("one")), begin(place, run("one"), name="other")
    await place.steps.reached("run one")
    await place.builder.cancel(first)
    place.steps.let_go("run one")
    assert (await ended(place, second)).state is BuildState.READY
    assert place.ran == ["one"]


async def test_deleted_while_it_is_built(place: Workplace) -> None:
    place.steps.hold("run one")
    build = begin(place, run("one"))
    await place.steps.reached("run one")
    await place.builder.deleted(place.node.templates.delete("mine"))
    assert_clean(place)
    with pytest.raises(NotFound):
        place.builder.find("mine", build.id)


# Waiting, and lives of the node


async def test_a_build_is_begun_once(place: Workplace) -> None:
    build = await built(place, run("one"))
    with pytest.raises(Conflict, match="ready cannot start"):
        place.builder.begin(build, define(template="base"))


async def test_refused_definitions_do_not_wait_for_ever(place: Workplace) -> None:
    _, build = place.builder.open("mine")
    place.builder.refuse(build, InvalidRequest("it is wrong"))
    refused = place.builder.find("mine", build.id)
    assert refused.state is BuildState.ERROR and refused.reason is not None
    assert refused.reason.message == "it is wrong"


async def test_what_nobody_begins_is_given_up_and_forgotten(place: Workplace) -> None:
    _, build = place.builder.open("mine")
    place.builder.sweep(build.created_at + 1800)
    assert place.builder.find("mine", build.id).state is BuildState.WAITING
    place.builder.sweep(build.created_at + 3601)
    assert place.builder.find("mine", build.id).state is BuildState.ERROR
    place.builder.sweep(build.created_at + 3 * 86400)
    with pytest.raises(NotFound):
        place.node.templates.named("mine")


async def test_old_builds_are_forgotten_and_what_tags_name_stays(place: Workplace) -> None:
    first = await built(place, run("one"))
    second = await built(place, run("two"))
    place.builder.sweep(second.updated_at + 86400)
    assert [build.id for build in place.node.templates.named("mine").builds] == [second.id]
    with pytest.raises(NotFound):
        place.builder.find("mine", first.id)
    assert not place.node.templates.serves(first.id)
    place.node.service.drop_outdated()
    assert {each.template.build_id for each in place.node.service.snapshots.of_kinds(("template",))} >= {
        second.id
    }
    assert place.node.service.snapshots.of_build(first.id) is None


async def test_a_node_that_dies_in_mid_build(place: Workplace) -> None:
    place.steps.hold("run two")
    build = begin(place, run("one"), run("two"))
    await place.steps.reached("run two")
    task = place.builder._tasks[build.id]
    await place.restart()
    broken = place.builder.find("mine", build.id)
    assert broken.state is BuildState.ERROR and broken.reason is not None
    assert broken.reason.message == "the node ended while it was built"
    place.node.assert_empty()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    place.steps.let_go("run two")
    await built(place, run("one"), run("two"))
    assert place.ran.count("one") == 1


async def test_a_node_that_stops(place: Workplace) -> None:
    place.steps.hold("run one")
    build = begin(place, run("one"))
    await place.steps.reached("run one")
    await place.builder.stop()
    stopped = place.builder.find("mine", build.id)
    assert stopped.reason is not None and stopped.reason.message == "the node stopped"
    assert_clean(place)
    with pytest.raises(Stopping):
        place.builder.open("other")


async def test_what_another_hypervisor_made_is_made_anew(place: Workplace) -> None:
    await built(place, run("one"), start=Start("serve", "up"))
    await built(place, run("one"), run("two"), name="other")
    place.node.versions["version"] = "2"
    place.commands.clear()
    await built(place, run("one"), run("three"), name="other")
    assert place.ran == ["one", "three"]
    assert_clean(place)


async def test_a_template_of_another_hypervisor_is_booted_from_its_disk(place: Workplace) -> None:
    build = await built(place, run("one"))
    place.node.versions["version"] = "2"
    sandbox = (await place.node.service.create(wanted("mine"))).sandbox
    assert sandbox.template.build_id == build.id
    assert place.ran == ["one"]
    await place.node.service.kill(sandbox.id)
    assert_clean(place)


async def test_login_shells_keep_a_path(place: Workplace) -> None:
    path = Step("ENV", ("PATH", "/opt/bin:$PATH"))
    await built(place, run("one"), path, name="below")
    told_to = [each.argv[-1] for each in place.commands if each.argv[-1].startswith("/opt/bin:")]
    assert len(told_to) == 1
    place.machines_made  # noqa: B018
    await built(place, Step("ENV", ("A", "1")), template="below", name="above")
    assert place.machines_made == 0, "they do already"


async def test_sizes_that_are_not_possible(place: Workplace) -> None:
    for vcpus, memory_mib in ((0, None), (65, None), (None, 127)):
        with pytest.raises(InvalidRequest):
            place.builder.open("mine", vcpus=vcpus, memory_mib=memory_mib)
