"""Finding kernel modules, and what each needs before it, without depmod.

A kernel package brings no modules.dep (installing it would make one), so dependencies are read
from the modules themselves: their `.modinfo` section holds `depends=a,b`.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.guestimage.commands import run

_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_SUFFIX = re.compile(r"\.ko(\.xz|\.zst|\.gz)?$")


@dataclass(frozen=True)
class Module:
    """A kernel module, not compressed."""

    name: str
    depends: tuple[str, ...]
    data: bytes


class ModuleTree:
    """The modules of one kernel: a directory like /lib/modules/VERSION."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._paths = {module_name(path): path for path in root.glob("kernel/**/*.ko*")}
        listing = root / "modules.builtin"
        lines = listing.read_text().splitlines() if listing.exists() else []
        self._builtin = {module_name(Path(line)) for line in lines}

    def builtin(self, name: str) -> bool:
        """Whether the kernel itself holds what a module of that name would bring."""
        return _canonical(name) in self._builtin

    def has(self, name: str) -> bool:
        """Whether there is a module of that name."""
        return _canonical(name) in self._paths

    def closure(self, names: Iterable[str]) -> list[Module]:
        """The modules named and all they need, each after what it needs; built-in ones are left out.

        Raises:
            HostFault: the kernel has no such module.
        """
        ordered: dict[str, Module] = {}
        for name in names:
            self._add(_canonical(name), ordered)
        return list(ordered.values())

    def _add(self, name: str, ordered: dict[str, Module]) -> None:
        if name in ordered or self.builtin(name):
            return
        module = self._read(name)
        for needed in module.depends:
            self._add(needed, ordered)
        ordered[name] = module

    def _read(self, name: str) -> Module:
        path = self._paths.get(name)
        if path is None:
            raise HostFault(
                f"the guest kernel has no module {name}: none under {self.root}",
                remedy="take a kernel with virtio_mmio, virtio_blk and virtio_net",
            )
        data = _decompressed(path)
        return Module(name, depends(data), data)


def depends(module: bytes) -> tuple[str, ...]:
    """Names of the modules that one needs, from its own bytes."""
    found = _DEPENDS.search(module)
    names = found[1].decode().split(",") if found else []
    return tuple(_canonical(name) for name in names if name)


def module_name(path: Path) -> str:
    """The name by which the kernel knows the module in a file: `virtio-rng.ko.xz` is virtio_rng."""
    return _canonical(_SUFFIX.sub("", path.name))


def _canonical(name: str) -> str:
    return name.replace("-", "_")


def _decompressed(path: Path) -> bytes:
    match path.suffix:
        case ".xz":
            return lzma.decompress(path.read_bytes())
        case ".gz":
            import gzip

            return gzip.decompress(path.read_bytes())
        case ".zst":  # Ubuntu's; the standard library reads zstd only from 3.14 on
            target = path.with_name(path.name + ".plain")
            try:
                run(["zstd", "-q", "-d", "-f", path, "-o", target], package="zstd")
                return target.read_bytes()
            finally:
                target.unlink(missing_ok=True)
        case _:
            return path.read_bytes()
