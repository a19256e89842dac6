"""`aenv build`: a template from a Dockerfile."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.assignments import variables
from agentenv.cli.meant import node_address
from agentenv.cli.options import (
    credential_options,
    credentials,
    init_option,
    node_options,
    quiet_option,
)
from agentenv.cli.shipped import shipped
from agentenv.errors import InvalidRequest, StoreFault

if TYPE_CHECKING:
    from agentenv.dockerfile.plan import Plan
    from agentenv.snapshot.records import Init

INTERRUPTED = 130


@click.command("build")
@click.argument("path", default=".", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME[:TAG]", help="What the template is to be called.")
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), help="The Dockerfile (PATH/Dockerfile)."
)
@click.option(
    "--build-arg", "arguments", multiple=True, metavar="NAME[=VALUE]", help="Value of an ARG; again for more."
)
@click.option("--target", metavar="STAGE", help="The stage to build, by name or number (the last one).")
@click.option("--cpu", type=click.IntRange(min=1), metavar="N", help="Virtual cpus of its sandboxes.")
@click.option("--memory", type=click.IntRange(min=128), metavar="MIB", help="Memory of its sandboxes in MiB.")
@click.option("--start", metavar="COMMAND", help="What runs in every sandbox, instead of ENTRYPOINT and CMD.")
@click.option("--ready", metavar="COMMAND", help="Tried until it succeeds; then the template is ready.")
@click.option("--no-cache", is_flag=True, help="Run every step anew.")
@click.option("--detach", is_flag=True, help="Do not wait for the end: print the ids and go.")
@click.option("--dry-run", is_flag=True, help="Print what would be asked of the node, as JSON; ask nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Show all of the log.")
@quiet_option
@init_option
@credential_options
@click.option("--registry", metavar="HOST[:PORT]", help="Whose they are, where several are asked.")
@click.option("--docker-login", is_flag=True, help="Send the node what `docker login` left here instead.")
@node_options
def command(
    path: Path,
    name: str | None,
    file: Path | None,
    arguments: tuple[str, ...],
    target: str | None,
    cpu: int | None,
    memory: int | None,
    start: str | None,
    ready: str | None,
    no_cache: bool,
    detach: bool,
    dry_run: bool,
    verbose: bool,
    quiet: bool,
    init: Init | None,
    username: str | None,
    password_stdin: bool,
    registry: str | None,
    docker_login: bool,
    url: str | None,
    api_key: str | None,
    home: Path | None,
) -> None:
    """Build a template from the Dockerfile in PATH, which is also the build context.

    Instead of PATH, code-interpreter-v1 is the template of E2B's code interpreter clients, which comes with
    this program.

    Everything that can be wrong with the Dockerfile is found before anything is made. Ctrl-C cancels.
    Exit codes: 0 ready, 1 the build failed, 2 the Dockerfile is wrong, 130 cancelled.

    \b
    Examples:
      aenv build . --name app
      aenv build . --name app:v2 --build-arg VERSION=2 --cpu 2 --memory 2048
      pass show ghcr | aenv build . --name app --username owner --password-stdin
      aenv build code-interpreter-v1
    """
    from agentenv.cli.building import Building, Wanted
    from agentenv.cli.builds import BuildNode

    if (known := shipped(path)) is not None:
        path, name = known.context, name or known.name
        cpu, memory = cpu or known.cpu, memory or known.memory
    plan = _plan(path, file, variables(arguments, "--build-arg"), target)
    wanted = Wanted(name or "", cpu, memory, start, ready, no_cache, init)
    if dry_run:
        click.echo(json.dumps(Building.preview(plan, wanted), indent=2))
        return
    if not name:
        raise InvalidRequest("the template needs a name", remedy="--name NAME")
    from agentenv.cli.registries import from_docker, from_options

    url, api_key = node_address(url, api_key, home)
    given = credentials(username, password_stdin)
    logins = from_docker(plan) if docker_login else from_options(plan, given, registry)
    building = Building(BuildNode(url, api_key), wanted, logins, verbose=verbose, quiet=quiet)
    try:
        build = building.run(plan, detach=detach)
    except KeyboardInterrupt:
        building.cancel()
        sys.exit(INTERRUPTED)
    click.echo(f"{name} {build.template_id} {build.build_id}")


def _plan(path: Path, file: Path | None, given: Mapping[str, str], target: str | None) -> Plan:
    """The plan, with what is worth knowing about it on stderr."""
    from agentenv.dockerfile.context import Context
    from agentenv.dockerfile.convert import plan
    from agentenv.dockerfile.syntax import DockerfileError

    dockerfile = file or path / "Dockerfile"
    context = Context.of(path, dockerfile)
    try:
        planned = plan(_text(dockerfile), context, arguments=given, target=target)
    except DockerfileError as error:
        where = f"{dockerfile}:{error.line}" if error.line else str(dockerfile)
        raise InvalidRequest(f"{where}: {error.bare}", remedy=error.remedy) from None
    for note in planned.notes:
        click.echo(f"{dockerfile}:{note.line}: {note.message}" if note.line else note.message, err=True)
    return planned


def _text(dockerfile: Path) -> str:
    try:
        return dockerfile.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidRequest(f"there is no {dockerfile}", remedy="name it with --file") from None
    except OSError as error:
        raise StoreFault(f"{dockerfile} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{dockerfile} is not text in UTF-8") from None
