"""`POST /init`: turns a machine, just booted or restored, into this sandbox."""

from __future__ import annotations

from agentenv.guest import drives, identity, ipv6, loop, remembered
from agentenv.guest.connect import (
    ConnectError,
    bytes_field,
    field,
    int_field,
    object_field,
    parse_message,
    text_field,
)
from agentenv.guest.context import VERSION
from agentenv.guest.freeze import Freezer
from agentenv.guest.http import HttpError, Response, json_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agentenv.guest.connect import Message
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Router
    from agentenv.guest.server import Server

DRIVE_FAILED = 422  # the status of an answer that says which disk cannot be used as it is wanted, and why
_LIMIT = 4 * 1024 * 1024
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.")


def register(
    router: Router, context: Context, server: Server, *, change_system: bool = True, remember: bool = False
) -> None:
    """Adds /init, /health, /envs, /fsfreeze and /fsthaw.

    Without `change_system` /init touches nothing outside the agent (clock, host name, files): for an
    agent that does not run in a machine of its own. With `remember` an agent that comes after this one goes
    on with what was said here.
    """
    freezer = Freezer() if change_system else Freezer(tuple)
    files: list[Callable[[], object]] = []

    def write_files() -> None:
        while files:
            _try(files.pop(0))

    async def write_files_next() -> None:
        write_files()

    # The answer need not wait for files, but whoever asks next finds them written.
    context.catch_ups.append(write_files)

    async def init(request: Request) -> Response:
        refuse_strangers(context, request)
        try:
            message = parse_message(await request.read(_LIMIT))
            changes, later = _changes(message) if change_system else ([], [])
            wanted = drives.wanted_of(message) if change_system else []
            wanted_mib = int_field(message, "diskSizeMB") if change_system else 0
            apply_to_context(context, message)
            if change_system and text_field(message, "caBundle"):
                context.env = {**identity.trust_variables(), **context.env}
        except ConnectError as error:
            raise HttpError(400, error.message) from None
        for change in changes:
            _try(change)
        try:
            if wanted_mib:
                await drives.grow_root(wanted_mib)
            for drive in wanted:
                drives.mount(drive)
        except drives.DriveFailed as error:
            raise HttpError(DRIVE_FAILED, str(error)) from None
        if later:
            files.extend(later)
            loop.spawn(write_files_next())
        lifecycle = text_field(message, "lifecycleID")
        if lifecycle and lifecycle != context.lifecycle:
            context.lifecycle = lifecycle
            freezer.release()  # as after a restore, when nobody is there who would thaw
            server.drop_others(request)
        if remember:
            _try(lambda: remembered.keep(context))
        return Response(204, headers=(("x-envd-version", VERSION),))

    async def freeze(request: Request) -> Response:
        """Everything written so far is on the disk when this is answered, and nothing more goes there until
        the connection is closed, or for some seconds."""
        refuse_strangers(context, request)
        await freezer.freeze(server.descriptor(request))
        return Response(204)

    async def thaw(request: Request) -> Response:
        """Answered when the filesystem can be written to again."""
        refuse_strangers(context, request)
        await freezer.thaw()
        return Response(204)

    async def health(request: Request) -> Response:
        return Response(204, headers=(("cache-control", "no-store"), ("x-envd-version", VERSION)))

    async def envs(request: Request) -> Response:
        return json_response(context.env)

    router.add("POST", "/init", init)
    router.add("POST", "/fsfreeze", freeze)
    router.add("POST", "/fsthaw", thaw)
    router.add("GET", "/health", health)
    router.add("GET", "/envs", envs)


def refuse_strangers(context: Context, request: Request) -> None:
    """HttpError 403 unless the request comes from the gateway, which no process in the guest is."""
    if request.peer != context.gateway:
        raise HttpError(403, "only the host may do this")


def apply_to_context(context: Context, message: Message) -> None:
    """Takes over what concerns later requests.

    A field that is absent leaves what was; `envVars` replaces all variables; an empty `accessToken`
    lets everyone in. `volumeMounts` and `hyperloopIP` are accepted and have no meaning here: volumes are
    drives that the host attaches, and the event address is E2B's own.
    """
    variables = object_field(message, "envVars")
    if variables is not None:
        if not all(isinstance(value, str) for value in variables.values()):
            raise ConnectError("invalid_argument", "envVars is not a map of strings")
        kept = {name: context.env[name] for name in _MARKERS.values() if name in context.env}
        context.env = {"E2B_SANDBOX": "true", **kept, **variables}
    if "accessToken" in message:
        context.token = text_field(message, "accessToken") or None
    context.default_user = text_field(message, "defaultUser") or context.default_user
    if "defaultWorkdir" in message:
        context.default_workdir = text_field(message, "defaultWorkdir") or None
    for name, variable in _MARKERS.items():
        if value := text_field(message, name):
            context.env[variable] = value


_MARKERS = {"sandboxId": "E2B_SANDBOX_ID", "templateId": "E2B_TEMPLATE_ID"}


def _changes(message: Message) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """What to do to the system, in order, and which files to write then; everything has been checked."""
    changes: list[Callable[[], object]] = []
    files: list[Callable[[], object]] = []
    if (moment := field(message, "timestamp")) is not None:
        nanoseconds = _nanoseconds(moment)
        changes.append(lambda: identity.set_clock(nanoseconds))
    if seed := bytes_field(message, "entropy"):
        changes.append(lambda: identity.add_entropy(seed))
    ipv6_wanted = field(message, "ipv6")
    if ipv6_wanted is not None:
        changes.append(lambda: ipv6.set_up(ipv6_wanted is True))
    if name := text_field(message, "hostname"):
        if len(name) > 64 or not _NAME_CHARACTERS.issuperset(name):
            raise ConnectError("invalid_argument", f"hostname {name!r} is not a host name")
        changes += [lambda: identity.set_hostname(name), identity.settle_boot_id]
        files.append(lambda: identity.write_hostname(name))
    if machine := text_field(message, "machineId"):
        if len(machine) != 32 or not set(machine) <= set("0123456789abcdef"):
            raise ConnectError("invalid_argument", "machineId is not 32 hexadecimal digits")
        files.append(lambda: identity.set_machine_id(machine))
    markers = {variable: value for key, variable in _MARKERS.items() if (value := text_field(message, key))}
    files.append(lambda: identity.write_markers({"E2B_SANDBOX": "true", **markers}))
    if bundle := text_field(message, "caBundle"):
        files.append(lambda: identity.trust(bundle))
    return changes, files


def _try(change: Callable[[], object]) -> None:
    try:
        change()
    except OSError as error:  # a read-only or odd image: the rest still counts; shown on the console
        loop.report(error)


def _nanoseconds(moment: object) -> int:
    try:
        if isinstance(moment, str):
            return identity.parse_time(moment)
        if isinstance(moment, int | float) and moment > 0:
            return int(moment * 10**9)
    except (ValueError, OverflowError):
        pass
    raise ConnectError("invalid_argument", f"timestamp {moment!r} is not a time")
