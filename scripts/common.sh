# Shared by quickstart and test: messages, system packages, the virtual environment. Sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
begun=$SECONDS

say() { printf '\n[%4d s] %s\n' $((SECONDS - begun)) "$*"; }

# fail CAUSE REMEDY: end with both on stderr.
fail() {
    printf '\n%s: %s\n  try: %s\n' "$(basename "$0")" "$1" "$2" >&2
    exit 1
}

# as_root COMMAND...: directly as root, else through sudo with what package tools need to reach their mirror.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo --preserve-env=http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY,DEBIAN_FRONTEND "$@"
    fi
}

check_host() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        fail "this is $(uname -sm); a node needs Linux on x86-64" "use such a machine"
    fi
    # shellcheck source=/dev/null
    . /etc/os-release
    case "$ID:$VERSION_ID" in
        debian:12 | debian:13 | ubuntu:24.04) ;;
        *) fail "this is $ID $VERSION_ID; known here are Debian 12, Debian 13 and Ubuntu 24.04" \
            "use one of them, or install by hand as docs/operations.md lists" ;;
    esac
    suite=$VERSION_CODENAME
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "this user is not root and there is no sudo" "run it as root"
        sudo -n true 2>/dev/null || sudo -v || fail "sudo refused" "run it as root, or as a user who may use sudo"
    fi
}

# What the host must have beside QEMU.
system_packages=(busybox-static ca-certificates cpio e2fsprogs iproute2 mmdebstrap nftables python3
    python3-venv util-linux xz-utils zstd)

missing_packages() {
    local name
    for name in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$name" 2>/dev/null)" = "ii " ] || printf '%s\n' "$name"
    done
}

# qemu_good: is there a QEMU of 8.2 or newer? Older ones corrupt flags under software emulation.
qemu_good() {
    local version
    version=$(qemu-system-x86_64 --version 2>/dev/null | sed -n 's/^QEMU emulator version \([0-9.]*\).*/\1/p')
    [ -n "$version" ] && dpkg --compare-versions "$version" ge 8.2
}

apt_quiet() {
    local log
    log=$(mktemp)
    if ! as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt-get $1 failed (its last lines are above)" \
            "see that apt reaches its mirror: apt-get update; a proxy goes into /etc/apt/apt.conf.d"
    fi
    rm -f "$log"
}

# backports: on Debian 12, QEMU comes from bookworm-backports, through the mirror that apt already uses.
add_backports() {
    grep -rqs "bookworm-backports" /etc/apt/sources.list /etc/apt/sources.list.d && return
    local mirror
    mirror=$(apt-get indextargets --format "\$(SITE) \$(CODENAME)" 2>/dev/null |
        awk '$2 == "bookworm" { print $1; exit }')
    [ -n "$mirror" ] || fail "apt has no source for bookworm, so the mirror for backports is not known" \
        "add a Debian mirror to /etc/apt/sources.list and run it again"
    say "Adding bookworm-backports from $mirror (for QEMU)"
    printf 'Types: deb\nURIs: %s\nSuites: bookworm-backports\nComponents: main\nSigned-By: %s\n' \
        "$mirror" /usr/share/keyrings/debian-archive-keyring.gpg |
        as_root tee /etc/apt/sources.list.d/aenv-backports.sources >/dev/null
}

# install_packages: the system packages, only what is missing.
install_packages() {
    local wanted from=()
    mapfile -t wanted < <(missing_packages "${system_packages[@]}")
    if ! qemu_good; then
        wanted+=(qemu-system-x86)
        if [ "$suite" = bookworm ]; then
            add_backports
            from=(-t bookworm-backports)
        fi
    fi
    [ ${#wanted[@]} -gt 0 ] || return 0
    say "Installing system packages: ${wanted[*]}"
    apt_quiet update
    if [ ${#from[@]} -gt 0 ]; then
        apt_quiet install --yes --no-install-recommends "${from[@]}" qemu-system-x86
    fi
    apt_quiet install --yes --no-install-recommends "${wanted[@]}"
    qemu_good || fail "the installed QEMU is older than 8.2, which corrupts guests under software emulation" \
        "install a newer qemu-system-x86 from your mirror's backports"
}

# make_environment LOCK...: .venv with the locked packages and the project; nothing when it is up to date.
make_environment() {
    local python=${AENV_PYTHON:-/usr/bin/python3} stamp="$root/.venv/.stamp" wanted log
    wanted=$(cd "$root" && { "$python" --version; echo "$root"; sha256sum pyproject.toml "$@"; } | sha256sum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    say "Making the virtual environment .venv"
    log=$(mktemp)
    {
        "$python" -m venv --clear "$root/.venv" &&
            "$root/.venv/bin/pip" install --quiet --disable-pip-version-check "${@/#/--requirement=$root/}" &&
            "$root/.venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable "$root"
    } >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        fail "the Python packages could not be installed (the last lines are above)" \
            "see that pip reaches its index: a proxy and certificates go into pip's configuration (pip config debug)"
    }
    rm -f "$log"
    echo "$wanted" >"$stamp"
}

aenv() { "$root/.venv/bin/aenv" "$@"; }
