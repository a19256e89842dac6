"""Commands of a Dockerfile as one text for a POSIX shell: RUN, CMD and ENTRYPOINT.

The node hands the text to a shell of the guest's. It is left as it stands where that already means the right
thing, so that logs show what the Dockerfile says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from agentenv.dockerfile.syntax import Instruction, heredoc_name

DEFAULT_SHELL = ("/bin/sh", "-c")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What reads commands from a terminal, and ends at once where there is none.
_INTERACTIVE = re.compile(r"(ba|da|a|z|k|fi)?sh|python[0-9.]*|i?python3?|node|irb|R|julia|ghci|psql|bpython")


def run_text(instruction: Instruction, shell: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command of a RUN.

    Args:
        instruction: the RUN.
        shell: the program and arguments that take the text as a last one (SHELL).
        variables: what its environment has besides the node's: ARGs.

    Raises:
        DockerfileError: there is nothing to run, or a heredoc that is not.
    """
    if not instruction.words or not any(word.strip() for word in instruction.words):
        raise instruction.fault("there is no command")
    exports = _exports(variables)
    if instruction.json:
        return f"{exports}exec {shlex.join(instruction.words)}"
    text = _with_heredocs(instruction, instruction.words[0])
    if _is_script(instruction) and text.startswith("#!"):
        return exports + _executed(instruction.heredocs[0].name, text)
    return exports + through(shell, text)


def through(shell: Sequence[str], text: str) -> str:
    """The text as the shell of SHELL would run it."""
    return text if tuple(shell) == DEFAULT_SHELL else f"exec {shlex.join([*shell, text])}"


def _exports(variables: Mapping[str, str]) -> str:
    # A name that is no shell variable cannot be exported by one; Docker would set it for nobody to read.
    named = {name: value for name, value in variables.items() if _PLAIN_NAME.fullmatch(name)}
    if not named:
        return ""
    return f"export {' '.join(f'{name}={shlex.quote(value)}' for name, value in named.items())}\n"


def _is_script(instruction: Instruction) -> bool:
    """Whether a heredoc is all there is: `RUN <<EOF`."""
    return len(instruction.heredocs) == 1 and heredoc_name(instruction.words[0].strip()) is not None


def _with_heredocs(instruction: Instruction, text: str) -> str:
    if not instruction.heredocs:
        return text
    if _is_script(instruction):
        return instruction.heredocs[0].content
    # `cmd <<A <<B` is the shell's own business: the bodies follow the line.
    return "".join([text, "\n", *(f"{each.content}{each.name}\n" for each in instruction.heredocs)])


def _executed(name: str, script: str) -> str:
    """A script with an interpreter line: written to a file of its own and executed."""
    end = delimiter(script)
    path = shlex.quote(f"/tmp/{PurePosixPath(name).name}.aenv-run")
    body = script if script.endswith("\n") else f"{script}\n"
    return (
        f"cat >{path} <<'{end}'\n{body}{end}\n"
        f"chmod 755 {path} && {path}\nstatus=$?\nrm -f {path}\nexit $status"
    )


def delimiter(body: str) -> str:
    """A heredoc delimiter that is no line of `body`."""
    lines = set(body.splitlines())
    end, count = "AENV_EOF", 0
    while end in lines:
        count += 1
        end = f"AENV_EOF_{count}"
    return end


def start_text(
    entrypoint: tuple[Instruction, Sequence[str]] | None, cmd: tuple[Instruction, Sequence[str]] | None
) -> str | None:
    """ENTRYPOINT and CMD, each with the SHELL in force there, as one command; None where there is nothing.

    The rules are the Dockerfile reference's ("Understand how CMD and ENTRYPOINT interact"): an ENTRYPOINT in
    shell form ignores CMD, one in exec form gets CMD's words as its last ones.
    """
    if entrypoint and entrypoint[0].words:
        instruction, shell = entrypoint
        if not instruction.json:
            return through(shell, instruction.words[0])
        return shlex.join([*instruction.words, *_argv(cmd)])
    if cmd is None or not cmd[0].words:
        return None
    return shlex.join(cmd[0].words) if cmd[0].json else through(cmd[1], cmd[0].words[0])


def _argv(cmd: tuple[Instruction, Sequence[str]] | None) -> tuple[str, ...]:
    if cmd is None or not cmd[0].words:
        return ()
    return cmd[0].words if cmd[0].json else (*cmd[1], cmd[0].words[0])


def waits_for_a_terminal(command: str) -> bool:
    """Whether a start command is a bare interactive program, such as the `bash` that many images end with."""
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    return (
        len(words) == 1 and _INTERACTIVE.fullmatch(PurePosixPath(words[0]).name) is not None
    ) or words in (["/bin/bash", "-l"], ["bash", "-l"])
