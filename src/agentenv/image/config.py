"""What an image says about how to run it (OCI image configuration, its `config` object)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from agentenv.errors import StoreCorrupt

# Programs that are systemd, by the names that images start it with.
SYSTEMD_PROGRAMS = frozenset(
    ("/sbin/init", "/usr/sbin/init", "/lib/systemd/systemd", "/usr/lib/systemd/systemd", "/bin/systemd")
)
# A label by which an image says whether it is to be started with systemd or not.
INIT_LABEL = "org.agentenv.init"
_INITS: dict[str, Literal["agent", "systemd"]] = {"agent": "agent", "systemd": "systemd"}

DOCUMENT_LIMIT = 8 << 20  # bytes; manifests and configurations are read whole


@dataclass(frozen=True)
class ImageConfig:
    """The parts of an image configuration that a sandbox can honour.

    Source: https://github.com/opencontainers/image-spec/blob/main/config.md. `user` is as written
    in the image (`name`, `uid`, `name:group` …); empty strings and tuples mean "not given".
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    exposed_ports: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_image(cls, document: Mapping[str, Any]) -> ImageConfig:
        """Read a whole image configuration document.

        Raises:
            StoreCorrupt: a field has a type that the specification does not allow.
        """
        config = document.get("config") or {}
        if not isinstance(config, Mapping):
            raise StoreCorrupt("the image's config is not an object", remedy="build the image again")
        return cls(
            env=_environment(_strings(config, "Env")),
            workdir=_string(config, "WorkingDir"),
            user=_string(config, "User"),
            entrypoint=_strings(config, "Entrypoint"),
            cmd=_strings(config, "Cmd"),
            exposed_ports=tuple(sorted(_object(config, "ExposedPorts"))),
            labels={key: str(value) for key, value in _object(config, "Labels").items()},
        )

    @property
    def init(self) -> Literal["agent", "systemd"]:
        """What is to be process 1: what the label says, else systemd where the image starts it."""
        program = (*self.entrypoint, *self.cmd)[:1]
        starts = bool(program) and program[0] in SYSTEMD_PROGRAMS
        return _INITS.get(self.labels.get(INIT_LABEL, ""), "systemd" if starts else "agent")

    def image_document(self) -> dict[str, Any]:
        """The `config` object of an image, of which `from_image` makes an equal value."""
        fields: dict[str, Any] = {
            "User": self.user,
            "ExposedPorts": {port: {} for port in self.exposed_ports},
            "Env": [f"{key}={value}" for key, value in self.env.items()],
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.cmd),
            "WorkingDir": self.workdir,
            "Labels": dict(self.labels),
        }
        return {key: value for key, value in fields.items() if value}

    def document(self) -> dict[str, Any]:
        """A JSON object from which `from_document` makes an equal value."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ImageConfig:
        """The inverse of `document`."""
        lists = {key: tuple(document[key]) for key in ("entrypoint", "cmd", "exposed_ports")}
        return cls(
            env=dict(document["env"]),
            workdir=document["workdir"],
            user=document["user"],
            labels=dict(document["labels"]),
            **lists,
        )


def _environment(entries: tuple[str, ...]) -> dict[str, str]:
    """`KEY=VALUE` entries as a mapping; the last one wins, one without `=` is an empty value."""
    pairs = (entry.partition("=") for entry in entries)
    return {key: value for key, _, value in pairs if key}


def _string(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key) or ""
    if not isinstance(value, str):
        raise _wrong_type(key, "a string")
    return value


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if isinstance(value, str):  # the shell form of old builders
        return ("/bin/sh", "-c", value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong_type(key, "a list of strings")
    return tuple(value)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise _wrong_type(key, "an object")
    return value


def _wrong_type(key: str, wanted: str) -> StoreCorrupt:
    return StoreCorrupt(f"the image's config has {key} that is not {wanted}", remedy="build the image again")
