"""What is taken over from the host's apt."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import InvalidRequest
from agentenv.image import aptsource
from agentenv.image.aptsource import DEBIAN, UBUNTU, AptSource
from agentenv.image.bootstrap import Host, System, arguments, supported

DEB822 = """\
# The usual.
Types: deb deb-src
URIs: http://mirror.example/debian/
Suites: trixie trixie-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: trixie-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .

Types: deb-src
URIs: http://source.example
Suites: trixie

Enabled: no
Types: deb
URIs: http://off.example
Suites: trixie
"""

LIST = """\
# deb http://comment.example x main
deb http://a.example/ubuntu/ noble main universe # trailing
deb [arch=amd64 signed-by=/k.gpg] https://b.example/ubuntu noble-updates main
deb-src http://a.example/ubuntu noble main
deb [trusted=yes] file:/srv/flat ./
"""


def test_deb822() -> None:
    main, security = aptsource.parse_deb822(DEB822)
    assert main.uri == "http://mirror.example/debian"
    assert main.suites == ("trixie", "trixie-updates")
    assert main.components == ("main", "contrib")
    assert main.signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert security.suites == ("trixie-security",)
    assert security.signed_by is None


def test_one_line_style() -> None:
    first, second, flat = aptsource.parse_list(LIST)
    assert first == AptSource("http://a.example/ubuntu", ("noble",), ("main", "universe"))
    assert second.signed_by == "/k.gpg"
    assert flat.components == ()


def test_the_hosts_own_mirror_is_used() -> None:
    planned = aptsource.plan("trixie", DEBIAN, aptsource.parse_deb822(DEB822))
    assert [(source.suites[0], source.uri) for source in planned] == [
        ("trixie", "http://mirror.example/debian"),
        ("trixie-updates", "http://mirror.example/debian"),
        ("trixie-security", "http://mirror.example/debian-security"),
    ]


def test_another_suite_of_the_same_distribution_comes_from_the_same_mirror() -> None:
    planned = aptsource.plan("bookworm", DEBIAN, aptsource.parse_deb822(DEB822))
    assert {source.uri for source in planned} == {
        "http://mirror.example/debian",
        "http://mirror.example/debian-security",
    }


def test_another_distribution_comes_from_its_public_mirror() -> None:
    planned = aptsource.plan("noble", UBUNTU, aptsource.parse_deb822(DEB822))
    assert {source.uri for source in planned} == {UBUNTU.mirror, UBUNTU.security_mirror}


def test_backports_are_not_taken_for_the_suite() -> None:
    backports = AptSource("http://bpo.example/debian", ("bookworm-backports",), ("main",))
    assert aptsource.plan("bookworm", DEBIAN, [backports])[0].uri == DEBIAN.mirror


def test_options_are_those_that_reach_the_mirror() -> None:
    dump = "\n".join(
        [
            'APT "";',
            'Acquire "";',
            'Acquire::http "";',
            'Acquire::http::Proxy "http://proxy.example:3128";',
            'Acquire::https::CAInfo "/etc/ssl/corp.pem";',
            'Acquire::Check-Valid-Until "false";',
            'Acquire::AllowInsecureRepositories "true";',
            'DPkg::Post-Invoke:: "rm -rf /";',
            'Acquire::GzipIndexes "true";',
        ]
    )
    assert aptsource.acquire_options(dump) == (
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::https::CAInfo "/etc/ssl/corp.pem";',
        'Acquire::Check-Valid-Until "false";',
    )


async def test_a_host_is_read(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(LIST)
    (tmp_path / "mirrors.list").write_text("# ours\nhttps://cdn.example/debian/ priority:1\n")
    (tmp_path / "sources.list.d/debian.sources").write_text(
        f"Types: deb\nURIs: mirror+file://{tmp_path}/mirrors.list\nSuites: bookworm\nComponents: main\n"
    )
    (tmp_path / "sources.list.d/off.list.disabled").write_text("deb http://off.example x main\n")
    (tmp_path / "auth.conf").write_text("machine a.example login x password y\n")
    host = await Host.read(tmp_path)
    assert [source.uri for source in host.sources] == [
        "http://a.example/ubuntu",
        "https://b.example/ubuntu",
        "file:/srv/flat",
        "https://cdn.example/debian",
    ]
    assert f'Dir::Etc::netrc "{tmp_path}/auth.conf";' in host.options


def test_command_line(tmp_path: Path) -> None:
    host = Host(tuple(aptsource.parse_deb822(DEB822)), ('Acquire::http::Proxy "http://p:1";',))
    line = arguments("trixie", tmp_path / "t", System(packages=("curl", "git")), DEBIAN, "/k.gpg", host)
    assert line[line.index("mmdebstrap") - 1] == "--kill-child"
    assert "--include=curl,git" in line
    assert '--aptopt=Acquire::http::Proxy "http://p:1";' in line
    assert line[line.index("trixie") :] == [
        "trixie",
        str(tmp_path / "t"),
        "deb http://mirror.example/debian trixie main",
        "deb http://mirror.example/debian trixie-updates main",
        "deb http://mirror.example/debian-security trixie-security main",
    ]


def test_suites() -> None:
    assert supported("bookworm") is supported("trixie") is DEBIAN
    assert supported("noble") is UBUNTU
    with pytest.raises(InvalidRequest, match="bookworm"):
        supported("buzz")
