"""Work on layers, done by a program of its own at the lowest priority (see `work`).

It takes seconds of a processor, and as a thread of the node it would hold what requests wait for.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from typing import Any

from agentenv.errors import HostFault
from agentenv.snapshot.work import ERRORS


async def quietly(what: str, **work: Any) -> Any:
    """What a piece of work returns, one of `work.WORK`. When this is cancelled the program is ended.

    Raises:
        StoreCorrupt, StoreFull, StoreFault: as the work does. HostFault: the program failed.
    """
    setpriv, nice, ionice = (shutil.which(name) for name in ("setpriv", "nice", "ionice"))
    if setpriv is None or nice is None or ionice is None:
        raise HostFault("setpriv, nice or ionice is missing", remedy="install util-linux and coreutils")
    program = await asyncio.create_subprocess_exec(
        *(setpriv, "--pdeathsig", "KILL", ionice, "-t", "-c", "3", nice, "-n", "19"),
        *(sys.executable, "-m", "agentenv.snapshot.work", json.dumps({"what": what, **work})),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        answer, words = await program.communicate()
    except BaseException:
        if program.returncode is None:
            program.kill()
            await program.wait()
        raise
    if program.returncode != 0:
        raise HostFault(f"{what} ended with {program.returncode}: {words.decode(errors='replace')[-500:]}")
    result = json.loads(answer)
    if "error" in result:
        raise ERRORS[result["code"]](result["error"])
    return result["done"]
