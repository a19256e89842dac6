"""Whole Dockerfiles: the steps that they come to, and what is refused before anything is made."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.dockerfile.bundle import Bundle
from agentenv.dockerfile.context import Context
from agentenv.dockerfile.convert import plan
from agentenv.dockerfile.plan import Image, Plan, StageOutput, Step, Template
from agentenv.dockerfile.request import body
from agentenv.dockerfile.syntax import DockerfileError
from agentenv.errors import NotFound


@pytest.fixture
def context(tmp_path: Path) -> Context:
    for name in ("a.txt", "b.txt", "src/main.py", "src/pkg/mod.py", "one file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("inner/file")
        member.uid, member.size = 5, 2
        tar.addfile(member, io.BytesIO(b"ok"))
    return Context(tmp_path)


def steps(made: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """Without the two that every stage begins with."""
    return [(step.type, step.args) for step in made.target.steps[2:]]


def copied(step: Step) -> dict[str, str]:
    """What a COPY packs: file names with their content, directories with none."""
    assert step.bundle is not None
    out = io.BytesIO()
    step.bundle.pack(out, step.bundle.digest())
    out.seek(0)
    with tarfile.open(fileobj=out, mode="r:gz") as tar:
        return {m.name: f.read().decode() if (f := tar.extractfile(m)) else "" for m in tar}


def test_a_whole_file(context: Context) -> None:
    made = plan(
        """
ARG VERSION=3.12
FROM python:${VERSION}-slim AS app
ARG MODE=fast EXTRA
LABEL maintainer=me
ENV APP=/srv/app MODE_IS="$MODE mode"
WORKDIR $APP
WORKDIR sub/../src
COPY --chown=1000:1000 --chmod=640 a.txt ${APP}/
RUN pip install . # really
USER nobody
EXPOSE 80
CMD ["python", "main.py"]
""",
        context,
        arguments={"EXTRA": "it's"},
    )
    assert made.target.base == Image("python:3.12-slim")
    assert made.target.title == "app"
    assert steps(made) == [
        ("ENV", ("APP", "/srv/app", "MODE_IS", "fast mode")),
        ("WORKDIR", ("/srv/app",)),
        ("WORKDIR", ("/srv/app/src",)),
        ("COPY", ("files", "/srv/app/", "1000:1000", "0640")),
        ("RUN", ("export MODE=fast EXTRA='it'\"'\"'s'\npip install . # really",)),
        ("USER", ("nobody",)),
    ]
    assert made.target.start == "python main.py"
    assert [(note.line, note.message.split(":")[0]) for note in made.notes] == [
        (5, "LABEL is left out"),
        (12, "EXPOSE is left out"),
    ]


def test_every_stage_begins_as_docker_does_unless_its_base_says_otherwise(context: Context) -> None:
    begun = plan("FROM a\n", context).target.steps
    assert [(step.type, step.args, step.extra) for step in begun] == [
        ("USER", ("root",), ("default",)),
        ("WORKDIR", ("/",), ("default",)),
    ]


@pytest.mark.parametrize(
    ("written", "source", "destination", "packed"),
    [
        ("COPY a.txt /x", "a.txt", "/x", {"a.txt": "a.txt"}),
        ("COPY a.txt /x/", "files", "/x/", {"files": "", "files/a.txt": "a.txt"}),
        ("COPY a.txt .", "files", "./", {"files": "", "files/a.txt": "a.txt"}),
        ("COPY *.txt /x/", "files", "/x/", {"files": "", "files/a.txt": "a.txt", "files/b.txt": "b.txt"}),
        (
            "COPY [a].txt b.tx? /x/",
            "files",
            "/x/",
            {"files": "", "files/a.txt": "a.txt", "files/b.txt": "b.txt"},
        ),
        ("COPY a.txt none* /x/", "files", "/x/", {"files": "", "files/a.txt": "a.txt"}),
        ('COPY ["one file", "/x y"]', "one file", "/x y", {"one file": "one file"}),
        (
            "COPY src /x",
            "files",
            "/x",
            {
                "files": "",
                "files/main.py": "src/main.py",
                "files/pkg": "",
                "files/pkg/mod.py": "src/pkg/mod.py",
            },
        ),
        (
            "COPY src/pkg a.txt x/",
            "files",
            "x/",
            {"files": "", "files/mod.py": "src/pkg/mod.py", "files/a.txt": "a.txt"},
        ),
        ("COPY <<EOF /x\nv $A '$A'\nEOF", "EOF", "/x", {"EOF": "v 1 '1'\n"}),
        (
            "COPY <<'EOF' a.txt /x/\nv $A\nEOF",
            "files",
            "/x/",
            {"files": "", "files/EOF": "v $A\n", "files/a.txt": "a.txt"},
        ),
        ("COPY data.tar.gz /x/data", "data.tar.gz", "/x/data", None),
        ("ADD a.txt /x", "a.txt", "/x", {"a.txt": "a.txt"}),
        ("ADD data.tar.gz /x", "files", "/x", {"files": "", "files/inner/file": "ok"}),
        ("ADD --unpack=false data.tar.gz /x", "data.tar.gz", "/x", None),
        (
            "ADD data.tar.gz a.txt /x/",
            "files",
            "/x/",
            {"files": "", "files/inner/file": "ok", "files/a.txt": "a.txt"},
        ),
        ("COPY --link a.txt /x", "a.txt", "/x", {"a.txt": "a.txt"}),
    ],
)
def test_copies(
    context: Context, written: str, source: str, destination: str, packed: dict[str, str] | None
) -> None:
    step = plan(f"FROM a\nARG A=1\n{written}\n", context).target.steps[-1]
    assert step.args == (source, destination, "0:0", "")
    if packed is not None:
        assert copied(step) == packed


def test_owners_of_an_archive_are_kept_unless_they_are_said(context: Context) -> None:
    kept, said = plan("FROM a\nADD data.tar.gz /x\nADD --chown=7 data.tar.gz /x\n", context).target.steps[2:]
    assert (kept.extra, said.extra) == (("owners",), ())
    assert said.args[2] == "7"


def test_names_that_a_node_would_take_for_something_else(context: Context) -> None:
    (context.root / "a[1].txt").write_text("odd")
    made = plan("FROM a\nCOPY a[[]1].txt /x/plain\nCOPY a.txt /\\$HOME/y\nWORKDIR '/$x'\n", context)
    odd, dollar, workdir = made.target.steps[2:]
    assert (odd.args[:2], copied(odd)) == (("plain", "/x/plain"), {"plain": "odd"})
    assert (dollar.args[1], dollar.extra) == ("/$HOME/y", ("verbatim",))
    assert (workdir.args, workdir.extra) == (("/$x",), ("verbatim",))


@pytest.mark.parametrize("image", ["e2bdev/base", "docker.io/e2bdev/base:latest"])
def test_on_e2bs_image_root_builds_and_its_user_stays(context: Context, image: str) -> None:
    made = plan(f"FROM {image} AS x\nRUN apt-get\nFROM x\nWORKDIR /srv\n", context)
    assert [(step.type, step.args, step.extra) for step in made.target.steps] == [
        ("USER", ("root",), ()),
        ("WORKDIR", ("/",), ()),
        ("RUN", ("apt-get",), ("login",)),
        ("WORKDIR", ("/srv",), ()),
        ("USER", ("user",), ()),
    ]
    assert plan(f"FROM {image}\nUSER me\n", context).target.steps[-1].args == ("/home/user",)


def test_env_of_the_base_image_is_left_to_the_node(context: Context) -> None:
    made = plan("FROM a\nENV PATH=/opt:$PATH HOME_IS='$HOME' X=1\nENV PATH=/two:$PATH\n", context)
    assert steps(made) == [
        ("ENV", ("PATH", "/opt:$PATH")),
        ("ENV", ("HOME_IS", "$HOME", "X", "1")),
        ("ENV", ("PATH", "/two:$PATH")),
    ]
    assert [step.extra for step in made.target.steps[2:]] == [(), ("verbatim",), ()]


def test_values_of_one_env_see_what_held_before_it(context: Context) -> None:
    made = plan("FROM a\nENV abc=hello\nENV abc=bye def=$abc\nENV ghi=$abc\n", context)
    assert [args for _, args in steps(made)] == [
        ("abc", "hello"),
        ("abc", "bye", "def", "hello"),
        ("ghi", "bye"),
    ]


def test_arguments(context: Context) -> None:
    text = """
ARG GLOBAL=g OTHER=o
FROM a AS one
ARG GLOBAL
ARG OTHER=own
ARG GIVEN=default
ARG TARGETARCH
ENV GIVEN_ENV=$GIVEN
ARG NEVER
RUN x
FROM one
RUN y
FROM b
RUN z
"""
    made = plan(text, context, arguments={"GIVEN": "yes", "http_proxy": "p", "WRONG": "1"}, target="1")
    exported = "export http_proxy=p GLOBAL=g OTHER=own GIVEN=yes TARGETARCH=amd64\n"
    assert [args for kind, args in steps(made) if kind == "RUN"] == [(f"{exported}x",), (f"{exported}y",)]
    assert "--build-arg WRONG: no ARG asks for it" in [note.message for note in made.notes]
    assert [args for kind, args in steps(plan(text, context)) if kind == "RUN"] == [("z",)]


def test_env_hides_an_argument(context: Context) -> None:
    made = plan("FROM a\nARG A=arg\nENV A=env\nARG A=again\nRUN x\nWORKDIR /$A\n", context)
    assert steps(made)[1:] == [("RUN", ("x",)), ("WORKDIR", ("/env",))]


STAGES = """
FROM golang AS build
RUN make
FROM node AS unused
RUN npm
FROM build AS more
RUN more
FROM debian
COPY --from=build /out/a /out/b* /usr/bin/
COPY --from=2 lib /lib
COPY --from=alpine:3 /etc/os-release /x
COPY --from=template://base:v2 --chmod=1 /y /y
"""


def test_stages(context: Context) -> None:
    made = plan(STAGES, context)
    assert [stage.index for stage in made.stages] == [0, 2, 3]
    assert [(step.args[0], step.origin) for step in made.target.steps[2:]] == [
        ("/out/a", StageOutput(0)),
        ("/out/b*", StageOutput(0)),
        ("/lib", StageOutput(2)),
        ("/etc/os-release", Image("alpine:3")),
        ("/y", Template("base:v2")),
    ]
    # a stage on another one shares its steps, and so the node's cache of them
    assert [step.args for step in made.stages[1].steps if step.type == "RUN"] == [("make",), ("more",)]
    asked = body(made.target, {}, {0: "tpl0", 2: "tpl2"})
    froms = [step["from"] for step in asked["steps"] if "from" in step]
    assert froms == ["tpl0", "tpl0", "tpl2", "image:alpine:3", "base:v2"]


def test_a_target_takes_what_it_needs_only(context: Context) -> None:
    assert [stage.index for stage in plan(STAGES, context, target="MORE").stages] == [2]
    assert [stage.index for stage in plan(STAGES, context, target="0").stages] == [0]
    with pytest.raises(NotFound, match="no stage nothing"):
        plan(STAGES, context, target="nothing")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('FROM a AS b\nENTRYPOINT ["e"]\nCMD ["c"]\nFROM b\nCMD ["d"]\n', "e d"),
        ('FROM a AS b\nCMD ["c"]\nFROM b\nENTRYPOINT ["e"]\n', "e"),
        ('FROM a\nCMD ["c"]\nENTRYPOINT ["e"]\n', "e c"),
        ('FROM a AS b\nSHELL ["/bin/bash", "-c"]\nFROM b\nCMD x | y\n', "exec /bin/bash -c 'x | y'"),
        ('FROM a\nCMD ["bash"]\n', None),
        ("FROM a\n", None),
    ],
)
def test_start_commands(context: Context, text: str, start: str | None) -> None:
    assert plan(text, context).target.start == start


@pytest.mark.parametrize(
    ("text", "ready"),
    [
        ("HEALTHCHECK --interval=1s CMD curl -f $URL || exit 1", "curl -f $URL || exit 1"),
        ('HEALTHCHECK CMD ["test", "-e", "/a b"]', "test -e '/a b'"),
        ("HEALTHCHECK CMD x\nHEALTHCHECK NONE", None),
        ("HEALTHCHECK cmd x", "x"),
    ],
)
def test_a_healthcheck_is_the_ready_command(context: Context, text: str, ready: str | None) -> None:
    assert plan(f"FROM a\nENTRYPOINT serve\n{text}\n", context).target.ready == ready
    assert plan(f"FROM a\n{text}\n", context).target.ready is None  # nothing is started


def test_bodies(context: Context) -> None:
    made = plan("FROM template://base\nENV A='$x'\nRUN ls\nADD data.tar.gz /x\nCMD serve\n", context)
    asked: dict[str, Any] = body(made.target, {4: "ab" * 32}, {}, ready="true", force=True)
    assert asked == {
        "fromTemplate": "base",
        "startCmd": "serve",
        "readyCmd": "true",
        "force": True,
        "steps": [
            {"type": "USER", "args": ["root"], "force": True, "default": True},
            {"type": "WORKDIR", "args": ["/"], "force": True, "default": True},
            {"type": "ENV", "args": ["A", "$x"], "force": True, "verbatim": True},
            {"type": "RUN", "args": ["ls"], "force": True, "login": False},
            {
                "type": "COPY",
                "args": ["files", "/x", "0:0", ""],
                "force": True,
                "filesHash": "ab" * 32,
                "owners": "archive",
            },
        ],
    }
    assert "startCmd" not in body(made.target, {}, {}, start="")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 0, "there is no FROM"),
        ("ARG A\n", 0, "there is no FROM"),
        ("RUN x\nFROM a\n", 1, "before the first FROM"),
        ("FROM a b\n", 1, "FROM IMAGE AS NAME"),
        ("FROM a AS 1x\n", 1, "not a name for a stage"),
        ("FROM $NOTHING\n", 1, "comes to nothing"),
        ("FROM scratch\n", 1, "scratch"),
        ("FROM --platform=linux/arm64 a\n", 1, "nodes run linux/amd64"),
        ("FROM a\nONBUILD RUN x\n", 2, "not supported"),
        ("FROM a\nRUN --mount=type=secret,id=x ls\n", 2, "type secret is not supported"),
        ("FROM a\nRUN --mount=target=/x ls\n", 2, "type bind is not supported"),
        ("FROM a\nRUN --network=none ls\n", 2, "--network=none"),
        ("FROM a\nRUN --device=gpu ls\n", 2, "--device"),
        ("FROM a\nCOPY x\n", 2, "needs a source and a destination"),
        ("FROM a\nCOPY nothing /x\n", 2, "no such file"),
        ("FROM a\nCOPY none* /x/\n", 2, "none of the sources"),
        ("FROM a\nCOPY *.txt /x\n", 2, "the destination /x is no directory"),
        ("FROM a\nCOPY a.txt b.txt /x\n", 2, "end it with a slash"),
        ("FROM a\nCOPY [a /x\n", 2, "is not a pattern"),
        ("FROM a\nCOPY --parents src/main.py /x/\n", 2, "--parents"),
        ("FROM a\nCOPY --exclude=*.md src /x/\n", 2, "--exclude"),
        ("FROM a\nCOPY --chmod=u+x a.txt /x\n", 2, "not a mode"),
        ("FROM a\nCOPY --chown=a:b:c a.txt /x\n", 2, "not an owner"),
        ("FROM a AS x\nCOPY --from=later /a /b\nFROM c AS later\nFROM x\n", 2, "comes later"),
        ("FROM a\nCOPY --from=0 /a /b\n", 2, "no such stage"),
        ("FROM a\nCOPY --from=$X /a /b\n", 2, "takes no variables"),
        ("FROM a\nADD https://example.org/x /x\n", 2, "not fetched"),
        ("FROM a\nADD git@example.org:x /x\n", 2, "not fetched"),
        ("FROM a\nADD --checksum=sha256:00 a.txt /x\n", 2, "--checksum"),
        ("FROM a\nADD --from=b a.txt /x\n", 2, "unknown flag --from"),
        ("FROM a\nWORKDIR $HOME/x\n", 2, "HOME is not set in this Dockerfile"),
        ("FROM a\nCOPY <<EOF /x\nlisten $port\nEOF\n", 2, "port is not set"),
        ("FROM a\nWORKDIR\n", 2, "needs a value"),
        ("FROM a\nUSER ''\n", 2, "needs a value"),
        ("FROM a\nSHELL /bin/bash\n", 2, "JSON array"),
        ("FROM a\nARG\n", 2, "needs a name"),
        ("FROM a\nHEALTHCHECK x\n", 2, "HEALTHCHECK CMD command"),
        ("FROM a\nENV\n", 2, "needs a name"),
    ],
)
def test_what_is_refused(context: Context, text: str, line: int, said: str) -> None:
    with pytest.raises(DockerfileError, match=said) as caught:
        plan(text, context)
    assert caught.value.line == line


def test_what_is_left_out_is_told(context: Context) -> None:
    made = plan(
        "FROM a\nRUN --mount=type=cache,target=/c x\nHEALTHCHECK --retries=3 CMD x\n"
        "VOLUME /v\nMAINTAINER me\nCMD bash\n",
        context,
    )
    assert [note.line for note in made.notes] == [2, 3, 4, 5, 6]
    assert isinstance(made.target.steps[-1].bundle, Bundle | None)
